"""Count this process's moves of memory between host and device, and its seconds by phase, without importing torch.

`offload_summary` joins the moves of all workers for summary.json.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from verl_patches.current import Current


@dataclass
class Counters:
    """Hold moves and seconds by phase until taken, and the bytes of host memory allocated since the process's start."""

    moves: list[dict[str, Any]] = field(default_factory=list)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    host_bytes: int = 0


_counters: Current[Counters] = Current(Counters())


def note_move(verb: str, group: str, size_bytes: int) -> None:
    """Record one move of a memory group; a move of no bytes is not recorded."""
    if size_bytes:
        _counters.value.moves.append({"verb": verb, "group": group, "bytes": size_bytes})


def note_host_allocation(size_bytes: int) -> None:
    """Count one allocation of host memory."""
    _counters.value.host_bytes += size_bytes


def note_empty_cache() -> None:
    """Record a call of empty_cache: a move without a memory group and without bytes."""
    _counters.value.moves.append({"verb": "empty_cache", "group": "", "bytes": 0})


def take_moves() -> list[dict[str, Any]]:
    """Return the moves of this process since the last call, in order: {verb, group, bytes}."""
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

    node, pinned = psutil.virtual_memory(), _counters.value.host_bytes
    resident = psutil.Process().memory_info().rss
    used = node.total - node.available
    return {"rss_bytes": resident, "pinned_bytes": pinned, "node_bytes": used, "node_share": used / node.total}


def offload_summary(workers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any] | None:
    """Return the summary of one step from the moves of every worker, None if nothing was moved.

    sequences: the distinct orders of moves ("load actor_params", "empty_cache") of the ranks, repeated loads of the
    chunks of one model merged; moves: {"load actor_params": {count, bytes}} of the rank that moves most.
    """
    if not any(record["bytes"] for records in workers for record in records):
        return None
    moves: dict[str, dict[str, int]] = {}
    for records in workers:
        sums: defaultdict[str, Counter] = defaultdict(Counter)
        for record in records:
            sums[_move_name(record)].update(count=1, bytes=record["bytes"])
        for name, counts in sums.items():
            if name not in moves or counts["bytes"] > moves[name]["bytes"]:
                moves[name] = dict(counts)
    sequences = [_sequence(records) for records in workers]
    return {
        "sequences": [sequence for i, sequence in enumerate(sequences) if sequence not in sequences[:i]],
        "moves": moves,
    }


def _move_name(record: dict[str, Any]) -> str:
    return f"{record['verb']} {record['group']}".strip()


def _sequence(records: Sequence[dict[str, Any]]) -> list[str]:
    names = [_move_name(record) for record in records]
    return [name for name, before in zip(names, ["", *names], strict=False) if name == "empty_cache" or name != before]
