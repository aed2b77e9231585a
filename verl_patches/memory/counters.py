"""Count this process's moves of memory between host and device, and its seconds by phase, without importing torch.

Code that moves memory runs inside `record_move` and counts its copies and new host memory. `offload_summary` joins the
moves of all workers for summary.json.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl_patches.current import Current

COPY_VERBS = ("load", "offload")  # the verbs of memory/schedule.py whose bytes are copied
TALLY_NAMES = ("copies", "copied_bytes", "host_allocations", "host_bytes")


@dataclass
class Counters:
    """Hold counts of this process: sums by TALLY_NAMES since its start; moves and seconds by phase until taken."""

    tally: Counter = field(default_factory=Counter)
    moves: list[dict[str, Any]] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))


_counters: Current[Counters] = Current(Counters())


@dataclass
class MovedBytes:
    """Hold the bytes of one move; the code that makes the move sets them."""

    bytes: int = 0


@contextmanager
def record_move(verb: str, group: str) -> Iterator[MovedBytes]:
    """Record the code inside as one move of a memory group; a move of no bytes is not recorded."""
    counters, moved = _counters.value, MovedBytes()
    before = Counter(counters.tally)
    yield moved
    if moved.bytes:
        counts = {name: counters.tally[name] - before[name] for name in TALLY_NAMES}
        counters.moves.append({"verb": verb, "group": group, **vars(moved), **counts})


def note_copy(size_bytes: int) -> None:
    """Count one copy between host and device."""
    _counters.value.tally.update(copies=1, copied_bytes=size_bytes)


def note_host_allocation(size_bytes: int) -> None:
    """Count one allocation of host memory."""
    _counters.value.tally.update(host_allocations=1, host_bytes=size_bytes)


def note_empty_cache() -> None:
    """Record a call of empty_cache: a move without a memory group and without bytes."""
    counts = dict.fromkeys(("bytes", *TALLY_NAMES), 0)
    _counters.value.moves.append({"verb": "empty_cache", "group": "", **counts})


def take_moves() -> list[dict[str, Any]]:
    """Return the moves of this process since the last call, in order: {verb, group, bytes, and TALLY_NAMES}."""
    moves, _counters.value.moves = _counters.value.moves, []
    return moves


@contextmanager
def time_phase(phase: str) -> Iterator[None]:
    """Add the wall seconds of the code inside to `phase`; the device's work counts where the host waits for it."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _counters.value.seconds[phase] += time.perf_counter() - start


def discarded_counters() -> AbstractContextManager[Any]:
    """Return a context manager inside which nothing is counted."""
    return _counters.set(Counters())


def note_process_age(phase: str) -> None:
    """Set `phase`, if it has no seconds yet, to this process's age: what interpreter, Ray and imports took to start."""
    import psutil

    _counters.value.seconds.setdefault(phase, time.time() - psutil.Process().create_time())


def take_seconds() -> dict[str, float]:
    """Return {phase: seconds} since the last call."""
    seconds, _counters.value.seconds = _counters.value.seconds, defaultdict(float)
    return dict(seconds)


def host_memory() -> dict[str, float]:
    """Return {rss_bytes, pinned_bytes: of this process, node_bytes: in use on its node, node_share: of its memory}.

    pinned_bytes: what this package has allocated for offloading since the process's start, pinned on NPUs; MindSpeed's
    swapped optimizer states are not in it.
    """
    import psutil

    node, pinned = psutil.virtual_memory(), _counters.value.tally["host_bytes"]
    resident = psutil.Process().memory_info().rss
    used = node.total - node.available
    return {"rss_bytes": resident, "pinned_bytes": pinned, "node_bytes": used, "node_share": used / node.total}


def offload_summary(workers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any] | None:
    """Return the summary of one step from the moves of every worker, None if nothing was moved.

    sequences: the distinct orders of moves ("load actor_params", "empty_cache") of the ranks, repeated loads of the
    chunks of one model merged; moves: {"load actor_params": {count, bytes, copied_bytes}} of the rank that moves most;
    to_device_bytes, to_host_bytes: copied bytes, {max, mean} over ranks; copies_per_byte: bytes copied over bytes that
    load and offload moved (1 is the least), the highest of any rank; host_allocations, host_bytes: the highest of any
    rank.
    """
    if not any(record["bytes"] for records in workers for record in records):
        return None
    moves: dict[str, dict[str, int]] = {}
    for records in workers:
        sums: defaultdict[str, Counter] = defaultdict(Counter)
        for record in records:
            sums[_move_name(record)].update(count=1, bytes=record["bytes"], copied_bytes=record["copied_bytes"])
        for name, counts in sums.items():
            if name not in moves or counts["bytes"] > moves[name]["bytes"]:
                moves[name] = dict(counts)
    sequences = [_sequence(records) for records in workers]
    return {
        "sequences": [sequence for i, sequence in enumerate(sequences) if sequence not in sequences[:i]],
        "moves": moves,
        "to_device_bytes": _max_and_mean([_sum_counts(records, "copied_bytes", "load") for records in workers]),
        "to_host_bytes": _max_and_mean([_sum_counts(records, "copied_bytes", "offload") for records in workers]),
        "copies_per_byte": max(_copies_per_byte(records) for records in workers),
        "host_allocations": max(_sum_counts(records, "host_allocations") for records in workers),
        "host_bytes": max(_sum_counts(records, "host_bytes") for records in workers),
    }


def _copies_per_byte(records: Sequence[dict[str, Any]]) -> float:
    moved = _sum_counts(records, "bytes", *COPY_VERBS)
    return _sum_counts(records, "copied_bytes") / moved if moved else 0.0


def _sum_counts(records: Sequence[dict[str, Any]], key: str, *verbs: str) -> int:
    return sum(record[key] for record in records if not verbs or record["verb"] in verbs)


def _move_name(record: dict[str, Any]) -> str:
    return f"{record['verb']} {record['group']}".strip()


def _sequence(records: Sequence[dict[str, Any]]) -> list[str]:
    names = [_move_name(record) for record in records]
    return [name for name, before in zip(names, ["", *names], strict=False) if name == "empty_cache" or name != before]


def _max_and_mean(values: Sequence[int]) -> dict[str, int]:
    return {"max": max(values), "mean": round(sum(values) / len(values))}
