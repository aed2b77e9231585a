"""The ledger of one worker: bytes of every memory group, checked against the schedule whenever a phase begins.

A memory group is registered with a function that measures it. A process has one ledger (worker/context.py), none with
recipe.memory.ledger=off. `memory_of_step` joins the ledgers of all workers into one step's account, as plain data for
summary.json, the step table and the picture. No torch at import.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.memory.schedule import MEMORY_GROUPS, Schedule, residency

log = logging.getLogger(__name__)
ACTIONS = ("report", "strict")


class MemoryLedgerError(RecipeError):
    """A memory group is where it must not be, or is not where it must be."""


@dataclass
class _Entry:
    """One memory group: `full_bytes` is what it holds on the device, None until it was first seen there.

    `may_stay`: it varies, and the schedule has not released it since it last had it on the device.
    """

    measure: Callable[[], int]
    full_bytes: int | None
    grows: bool
    varies: bool
    may_stay: bool = False

    def held_bytes(self) -> int:
        return self.measure()


@dataclass
class Ledger:
    """Bytes by memory group and phase. `enter(phase)` checks and begins a record; `take` gives the records away.

    `schedule` and `stays` (schedule.py) say what is expected. `action`: report logs a violation and keeps it for the
    record, strict raises MemoryLedgerError. `device_memory` measures the process itself: {name: bytes}; see
    `memory_of_process`. Groups that are not registered are not checked.
    """

    schedule: Schedule
    stays: Collection[str] = ()
    action: str = "report"
    rank: int = 0
    device_memory: Callable[[], dict[str, int]] = dict
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _records: list[dict[str, Any]] = field(default_factory=list)
    _violations: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"memory ledger: action is {self.action!r}; expected one of {', '.join(ACTIONS)}")
        self._expected = residency(self.schedule, self.stays)

    def register(
        self,
        group: str,
        measure: Callable[[], int],
        *,
        full_bytes: int | None = None,
        grows: bool = False,
        varies: bool = False,
    ) -> None:
        """Watch `group`: `measure()` gives the bytes that it holds now.

        `full_bytes`: what it holds when it is there; None learns it the first time it is. `grows`: until it has once
        held `full_bytes` it may hold less (Adam's moments are made in the first step). `varies`: it holds what a step
        gives it, also in phases that come again (REMAX generates twice) until the schedule releases it. ConfigError for
        a name that is not in MEMORY_GROUPS or was registered before.
        """
        if group not in MEMORY_GROUPS or group in self._entries:
            why = "is registered already" if group in self._entries else f"is none of {', '.join(MEMORY_GROUPS)}"
            raise ConfigError(f"memory ledger: group {group!r} {why}")
        self._entries[group] = _Entry(measure, full_bytes, grows, varies)

    def enter(self, phase: str) -> None:
        """The moves at `phase`'s entry are done: record what is there, and check it. MemoryLedgerError if strict."""
        self.schedule.phase(phase)
        held = {group: entry.held_bytes() for group, entry in self._entries.items()}
        total = sum(held.values())
        self._records.append(
            {"phase": phase, "bytes": held, "total_bytes": total, "peak_bytes": total, "measured": self.device_memory()}
        )
        found = [
            text for group, entry in self._entries.items() if (text := self._fault(phase, group, entry, held[group]))
        ]
        if found and self.action == "strict":
            raise MemoryLedgerError("\n  ".join(found))

    def look(self, extra_bytes: int = 0) -> None:
        """Raise the peak of the phase that runs to what is there now; `extra_bytes` on top, held only for a while."""
        if self._records:
            record = self._records[-1]
            total = extra_bytes + sum(entry.held_bytes() for entry in self._entries.values())
            record["peak_bytes"] = max(record["peak_bytes"], total)
            record["measured"] = _highest(record["measured"], self.device_memory())

    def take(self) -> dict[str, Any]:
        """{records, violations} since the last call."""
        self.look()
        taken = {"records": self._records, "violations": self._violations}
        self._records, self._violations = [], []
        return taken

    def _fault(self, phase: str, group: str, entry: _Entry, held: int) -> str:
        there = group in self._expected[phase]
        if entry.varies:
            entry.may_stay = there or (entry.may_stay and not self.schedule.releases(group, phase))
            if entry.may_stay:
                return ""
        if there and entry.full_bytes is None and held:
            entry.full_bytes = held
        entry.grows = entry.grows and held != entry.full_bytes
        wanted = entry.full_bytes if there else 0
        if held == wanted or (there and entry.grows and held < wanted):
            return ""
        self._violations.append({"phase": phase, "group": group, "bytes": held, "expected_bytes": wanted})
        text = (
            f"memory ledger, rank {self.rank}, entering {phase}: {group} ({MEMORY_GROUPS[group]}) holds "
            f"{held:,} bytes, expected {_number(wanted)}: {self._why(phase, group, there, held, wanted)}"
        )
        log.warning(text)
        return text

    def _why(self, phase: str, group: str, there: bool, held: int, wanted: int | None) -> str:
        if there and wanted is not None and held > wanted:
            return f"{held - wanted:,} bytes more than registered: allocated since then"
        if there:
            expected = f"schedule {self.schedule.name!r} has it on the device in this phase"
            return f"{expected}, but it was released or never loaded"
        by = self.schedule.released_by(group, phase)
        when = f"it should have been released {by}" if by else "it is never loaded"
        return f"schedule {self.schedule.name!r} does not have it on the device in this phase; {when}"


def _number(size_bytes: int | None) -> str:
    return "some" if size_bytes is None else f"{size_bytes:,}"


def _highest(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {**one, **other}}


def memory_of_process(device_type: str) -> Callable[[], dict[str, int]]:
    """What measures this process beside the ledger, since the call before: the allocator's figures, or RSS on a CPU.

    npu and cuda: {allocated, peak, reserved, used}, where `peak` starts anew with every call; cpu: {rss}. Bytes. `used`
    is what the driver has given to anybody on this device: the others do not see memory past torch's pool (vLLM's sleep
    mode maps and unmaps there).
    """
    if device_type == "cpu":
        import psutil

        return lambda: {"rss": psutil.Process().memory_info().rss}
    import torch

    device = getattr(torch, device_type)

    def measure() -> dict[str, int]:
        free, total = device.mem_get_info()
        found = {
            "allocated": device.memory_allocated(),
            "peak": device.max_memory_allocated(),
            "reserved": device.memory_reserved(),
            "used": total - free,
        }
        device.reset_peak_memory_stats()
        return found

    return measure


KEPT_VIOLATIONS = 20  # a wrong table violates in every phase of every rank: the first ones tell it


def memory_of_step(workers: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """{peak_bytes, phases, violations} of one step; None where no worker keeps a ledger. Bytes.

    `phases`: {phase: {rank, peak_bytes, bytes: {group: bytes as the phase begins}, measured: {name: bytes}}} of the
    rank whose peak is highest; `measured` is the highest of any rank, by name. A phase that came twice (a validation)
    counts with the higher. `violations`: how many there were and the first ones, each with its rank.
    """
    kept = [worker for worker in workers if worker is not None]
    if not kept:
        return None
    phases: dict[str, dict[str, Any]] = {}
    for worker in kept:
        for record in worker["records"]:
            best = phases.setdefault(record["phase"], {"rank": -1, "peak_bytes": -1, "bytes": {}, "measured": {}})
            if record["peak_bytes"] > best["peak_bytes"]:
                best.update(rank=worker["rank"], peak_bytes=record["peak_bytes"], bytes=record["bytes"])
            for name, size in record["measured"].items():
                best["measured"][name] = max(size, best["measured"].get(name, 0))
    violations = [{"rank": worker["rank"], **each} for worker in kept for each in worker["violations"]]
    return {
        "peak_bytes": max((p["peak_bytes"] for p in phases.values()), default=0),
        "phases": phases,
        "violations": {"count": len(violations), "first": violations[:KEPT_VIOLATIONS]},
    }


def said_of(violations: dict[str, Any]) -> str:
    """One line about a step's violations, "" if there were none."""
    if not violations["count"]:
        return ""
    first = violations["first"][0]
    wanted = "some" if first["expected_bytes"] is None else f"{first['expected_bytes']:,}"
    return (
        f"memory ledger: {violations['count']} violation(s), first: rank {first['rank']}, {first['phase']}: "
        f"{first['group']} holds {first['bytes']:,} bytes, expected {wanted} (driver.log says who should "
        "have released it)"
    )
