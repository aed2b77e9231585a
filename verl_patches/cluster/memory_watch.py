"""Peak memory of all processes of a run together, as PSS: shared pages are divided among users, so sums are true.

Reading PSS walks a process's page tables, so it is read when the cheap resident size has grown, and every few seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import psutil

from verl_patches.cluster.processes import name_of

GROWTH = 1.01  # read PSS when the resident size exceeds that of the last reading by this factor
AT_LEAST_EVERY = 10  # ... or after so many looks


class MemoryWatch:
    """Feed `look` with the living processes about once a second; `peaks` tells the highest that was seen."""

    def __init__(self) -> None:
        self._peak: dict[psutil.Process, int] = {}
        self._name: dict[psutil.Process, str] = {}
        self._total = self._rss_at_reading = self._looks = 0
        self.fallbacks = 0  # readings where PSS was refused and the resident size was taken

    def look(self, processes: Iterable[psutil.Process]) -> None:
        """One sample: cheap resident sizes, and PSS where it is due."""
        processes = list(processes)
        rss = sum(filter(None, (_rss(p) for p in processes)))
        due = self._looks % AT_LEAST_EVERY == 0 or rss > self._rss_at_reading * GROWTH
        self._looks += 1
        if not due or not processes:
            return
        self._rss_at_reading = rss
        total = 0
        for process in processes:
            size = self._pss(process)
            total += size
            if size >= self._peak.get(process, 0):
                self._peak[process] = size
            name = name_of(process)
            if name not in ("gone", "IDLE") or process not in self._name:
                self._name[process] = name
        self._total = max(self._total, total)

    def _pss(self, process: psutil.Process) -> int:
        try:
            return process.memory_full_info().pss
        except psutil.NoSuchProcess:
            return 0
        except (psutil.AccessDenied, AttributeError):
            self.fallbacks += 1
            return _rss(process) or 0

    def peaks(self) -> dict[str, int]:
        """{process: peak bytes, "total": peak of the sum, bytes}; equal names are numbered by size.

        Where PSS could not be read, "resident_not_pss" counts the readings for which the resident size stands in.
        """
        names = Counter(self._name.values())
        seen: Counter[str] = Counter()
        found = {}
        for process, size in sorted(self._peak.items(), key=lambda item: -item[1]):
            name = self._name[process]
            found[f"{name} {seen[name]}" if names[name] > 1 else name] = size
            seen[name] += 1
        found["total"] = self._total
        return {**found, "resident_not_pss": self.fallbacks} if self.fallbacks else found


def _rss(process: psutil.Process) -> int | None:
    try:
        return process.memory_info().rss
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return None
