"""What was moved between host and device, counted where it is done, and one step's account of it. No torch.

Seconds that this worker spent per phase inside calls that the trainer sees as one (offload within rollout, ...).
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

COPYING = ("load", "offload")  # the verbs of memory/schedule.py whose bytes are copied


@dataclass
class Tally:
    """What has been done in this process so far: copies between host and device, and host memory made for them."""

    copies: int = 0
    copied_bytes: int = 0
    host_allocations: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Moved:
    """One move: `verb` and `group` of memory/schedule.py, `bytes` moved, and what it took.

    `peak_bytes`: for a swapped step the most that was on the device at once, else 0.
    """

    verb: str
    group: str
    bytes: int
    copies: int = 0
    copied_bytes: int = 0
    host_allocations: int = 0
    host_bytes: int = 0
    peak_bytes: int = 0


@dataclass
class Found:
    """What a move fills in while it runs: its verb, bytes moved, and the peak of a swapped step."""

    verb: str
    bytes: int = 0
    peak_bytes: int = 0


TALLY = Tally()
_MOVED: list[Moved] = []


@contextmanager
def move(verb: str, group: str) -> Iterator[Found]:
    """Record what happens inside as one move, unless no bytes moved; the caller fills in what it is given."""
    before, found = asdict(TALLY), Found(verb)
    yield found
    if found.bytes:
        spent = {name: value - before[name] for name, value in asdict(TALLY).items()}
        _MOVED.append(Moved(found.verb, group, found.bytes, peak_bytes=found.peak_bytes, **spent))


def note_empty_cache() -> None:
    """Record a call of empty_cache: a move without a memory group and without bytes."""
    _MOVED.append(Moved("empty_cache", "", 0))


def take_moves() -> list[dict[str, Any]]:
    """This process's moves since the last call, in order, as plain data."""
    taken = [asdict(each) for each in _MOVED]
    _MOVED.clear()
    return taken


def offload_of_step(workers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any] | None:
    """One step's moves from every worker's, None where nothing moved.

    {sequences: what ranks did one after the other, each different one once ("load actor_params", "empty_cache"; the
    chunks of a model are one); moves: {"load actor_params": {count, bytes, copied_bytes}}: of the rank that moves most,
    chunks counted; to_device_bytes, to_host_bytes: {max, mean} over ranks of what was copied; copies_per_byte: copied /
    moved by load and offload, of the rank where it is highest; host_allocations, host_bytes: the most of any rank;
    swap_peak_bytes}.
    """
    if not any(each["bytes"] for mine in workers for each in mine):
        return None
    moves: dict[str, dict[str, int]] = {}
    for mine in workers:
        for name, sums in _by_name(mine).items():
            if name not in moves or sums["bytes"] > moves[name]["bytes"]:
                moves[name] = sums
    sequences = list(map(_sequence, workers))
    return {
        "sequences": [found for at, found in enumerate(sequences) if found not in sequences[:at]],
        "moves": moves,
        "to_device_bytes": _spread([_sum(mine, "copied_bytes", "load") for mine in workers]),
        "to_host_bytes": _spread([_sum(mine, "copied_bytes", "offload") for mine in workers]),
        "copies_per_byte": max(copies_per_byte(mine) for mine in workers),
        "host_allocations": max(_sum(mine, "host_allocations") for mine in workers),
        "host_bytes": max(_sum(mine, "host_bytes") for mine in workers),
        "swap_peak_bytes": max((each["peak_bytes"] for mine in workers for each in mine), default=0),
    }


def copies_per_byte(mine: Sequence[dict[str, Any]]) -> float:
    """Bytes copied by all moves over bytes that load and offload moved; 1 is the least."""
    needed = sum(_sum(mine, "bytes", verb) for verb in COPYING)
    return _sum(mine, "copied_bytes") / needed if needed else 0.0


def _sum(mine: Sequence[dict[str, Any]], name: str, verb: str | None = None) -> int:
    return sum(each[name] for each in mine if verb in (None, each["verb"]))


def _name(move: dict[str, Any]) -> str:
    return f"{move['verb']} {move['group']}".strip()


def _sequence(mine: Sequence[dict[str, Any]]) -> list[str]:
    names = list(map(_name, mine))
    return [name for name, before in zip(names, ["", *names], strict=False) if name == "empty_cache" or name != before]


def _by_name(mine: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for each in mine:
        sums = found.setdefault(_name(each), {"count": 0, "bytes": 0, "copied_bytes": 0})
        sums["count"] += 1
        for name in ("bytes", "copied_bytes"):
            sums[name] += each[name]
    return found


def _spread(of_rank: Sequence[int]) -> dict[str, int]:
    return {"max": max(of_rank), "mean": round(sum(of_rank) / len(of_rank))}


_SECONDS: defaultdict[str, float] = defaultdict(float)
_LOCK = threading.Lock()


@contextmanager
def timed(phase: str) -> Iterator[None]:
    """Wall seconds inside are added to `phase`. Device work is not waited for: it counts where it is awaited."""
    start = time.perf_counter()
    try:
        yield
    finally:
        with _LOCK:
            _SECONDS[phase] += time.perf_counter() - start


def take_seconds() -> dict[str, float]:
    """{phase: seconds} since the last take, which starts anew."""
    with _LOCK:
        taken = dict(_SECONDS)
        _SECONDS.clear()
    return taken
