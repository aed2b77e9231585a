"""Measure the bytes of a worker's memory groups when a phase begins, and check them against the memory schedule.

Each memory group is registered with a function that measures it. A process has one ledger (worker/context.py), or none
with recipe.memory.ledger=off. `memory_summary` joins the ledgers of all workers for summary.json, the step table and
the memory plot. Does not import torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_patches.errors import RecipeError
from verl_patches.memory.schedule import MEMORY_GROUPS, Schedule, residency

log = logging.getLogger(__name__)


@dataclass
class _Entry:
    """Hold the state of one memory group.

    `full_bytes`: its bytes on the device; None takes the first measurement there. `partial_at_first`: it may hold less
    until it has once held `full_bytes` (Adam's moments are made in the first step). `any_size`: any number of bytes is
    accepted, also in phases that come again (REMAX generates twice), until the schedule releases it; `may_be_resident`:
    whether such a group may be on the device, as the schedule has not released it since it was last expected there.
    """

    held_bytes: Callable[[], int]
    full_bytes: int | None = None
    partial_at_first: bool = False
    any_size: bool = False
    may_be_resident: bool = False


@dataclass
class Ledger:
    """Record bytes by memory group and phase: `enter(phase)` checks and begins a record, `take` returns the records.

    `schedule` and `unmoved_groups` (schedule.py) say which groups must be on the device. `action`: "report" logs and
    records a violation, "strict" raises RecipeError. `device_memory` measures the process: {name: bytes}, see
    `process_memory_meter`. Groups that are not registered are not checked.
    """

    schedule: Schedule
    unmoved_groups: Collection[str] = ()
    action: str = "report"
    rank: int = 0
    device_memory: Callable[[], dict[str, int]] = dict
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _records: list[dict[str, Any]] = field(default_factory=list)
    _violations: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._expected = residency(self.schedule, self.unmoved_groups)

    def register(self, group: str, measure: Callable[[], int], **options: Any) -> None:
        """Add a memory group; `measure()` returns the bytes that it holds now; `options`: fields of `_Entry`."""
        self._entries[group] = _Entry(measure, **options)

    def enter(self, phase: str) -> None:
        """Record and check the groups after the moves at `phase`'s entry; a strict ledger raises RecipeError."""
        held = self.held_bytes()
        total, measured = sum(held.values()), self.device_memory()
        record = {"phase": phase, "bytes": held, "total_bytes": total, "peak_bytes": total, "measured": measured}
        self._records.append(record)
        faults = [self._fault(phase, group, entry, held[group]) for group, entry in self._entries.items()]
        if any(faults) and self.action == "strict":
            raise RecipeError("\n  ".join(filter(None, faults)))

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes that each group holds now."""
        return {group: entry.held_bytes() for group, entry in self._entries.items()}

    def raise_peak(self, extra_bytes: int = 0) -> None:
        """Raise the peak of the current phase to the bytes held now plus `extra_bytes` of temporary memory."""
        if self._records:
            record = self._records[-1]
            total = extra_bytes + sum(self.held_bytes().values())
            record["peak_bytes"] = max(record["peak_bytes"], total)
            for name, size in self.device_memory().items():
                record["measured"][name] = max(size, record["measured"].get(name, 0))

    def take(self) -> dict[str, Any]:
        """Return {records, violations} since the last call."""
        self.raise_peak()
        taken = {"records": self._records, "violations": self._violations}
        self._records, self._violations = [], []
        return taken

    def _fault(self, phase: str, group: str, entry: _Entry, held: int) -> str:
        there = group in self._expected[phase]
        if entry.any_size:
            entry.may_be_resident = there or (entry.may_be_resident and not self.schedule.releases(group, phase))
            if entry.may_be_resident:
                return ""
        if there and entry.full_bytes is None and held:
            entry.full_bytes = held
        entry.partial_at_first = entry.partial_at_first and held != entry.full_bytes
        wanted = entry.full_bytes if there else 0
        may_hold_less = there and entry.partial_at_first
        if held == wanted or (may_hold_less and (wanted is None or held < wanted)):
            return ""
        self._violations.append({"phase": phase, "group": group, "bytes": held, "expected_bytes": wanted})
        text = (
            f"memory ledger, rank {self.rank}, entering {phase}: {group} ({MEMORY_GROUPS[group]}) holds "
            f"{held:,} bytes, expected {_bytes_text(wanted)} by schedule {self.schedule.name!r}"
        )
        log.warning(text)
        return text


def _bytes_text(size_bytes: int | None) -> str:
    return "more than 0" if size_bytes is None else f"{size_bytes:,}"


def process_memory_meter(device_type: str) -> Callable[[], dict[str, int]]:
    """Return a function that measures this process's memory in bytes: torch's allocator, or RSS on a CPU.

    npu: {allocated, peak, reserved, used}; `peak` counts from the previous call. `used` is the driver's figure for all
    processes on the device: only it includes memory outside torch's pool (vLLM's sleep mode). cpu: {rss}.
    """
    if device_type == "cpu":
        import psutil

        return lambda: {"rss": psutil.Process().memory_info().rss}
    import torch

    device = getattr(torch, device_type)

    def measure() -> dict[str, int]:
        free, total = device.mem_get_info()
        measured = {
            "allocated": device.memory_allocated(),
            "peak": device.max_memory_allocated(),
            "reserved": device.memory_reserved(),
            "used": total - free,
        }
        device.reset_peak_memory_stats()
        return measured

    return measure


def memory_summary(workers: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return {peak_bytes, phases, violations} of one step, in bytes; None if no worker has a ledger.

    `phases`: {phase: {rank, peak_bytes, bytes: {group: bytes as the phase begins}, measured: {name: bytes}}} of the
    rank with the highest peak; `measured` is the highest of any rank. If a phase came twice (validation), the higher
    peak counts. `violations`: {count, first: the first 20, each with its rank}.
    """
    ledgers = [worker for worker in workers if worker is not None]
    if not ledgers:
        return None
    phases: dict[str, dict[str, Any]] = {}
    for ledger in ledgers:
        for record in ledger["records"]:
            best = phases.setdefault(record["phase"], {"rank": -1, "peak_bytes": -1, "bytes": {}, "measured": {}})
            if record["peak_bytes"] > best["peak_bytes"]:
                best.update(rank=ledger["rank"], peak_bytes=record["peak_bytes"], bytes=record["bytes"])
            for name, size in record["measured"].items():
                best["measured"][name] = max(size, best["measured"].get(name, 0))
    violations = [{"rank": ledger["rank"], **violation} for ledger in ledgers for violation in ledger["violations"]]
    return {
        "peak_bytes": max((phase["peak_bytes"] for phase in phases.values()), default=0),
        "phases": phases,
        # a wrong schedule gives violations in every phase of every rank, of which the first ones are enough
        "violations": {"count": len(violations), "first": violations[:20]},
    }


def violation_text(violations: dict[str, Any]) -> str:
    """Return one line about a step's violations, "" if there were none."""
    if not violations["count"]:
        return ""
    first = violations["first"][0]
    return (
        f"memory ledger: {violations['count']} violation(s), first: rank {first['rank']}, {first['phase']}: "
        f"{first['group']} holds {first['bytes']:,} bytes, expected {_bytes_text(first['expected_bytes'])}"
    )
