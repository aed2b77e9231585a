"""How long a process of a run may stay in one phase before it counts as a stall. No torch.

A place is a phase of a worker, or a call where it has no phases. The first time there has a fixed bound; later ones the
larger of a least time and `factor` times the longest time that any rank was there so far. A rank that waits for another
in a process group has a shorter bound, as HCCL would end it with an error that names only the rank that waited.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_patches.layout.phases import LAST_CHECKPOINT, PROFILE, VALIDATE
from verl_patches.watch.heartbeat import Beat
from verl_patches.watch.node import Seen

# They wait for the slowest disk, or analyse a trace: what they took before says nothing, so Bounds.load_s holds
SLOW_CALLS, SLOW_PHASES = {"init_model", "load_checkpoint", "finish_checkpoint"}, {LAST_CHECKPOINT, PROFILE}
WAIT_SHARE = 0.8  # of recipe.train.collective_timeout_minutes: the rest (216 s of 18 min) is left to collect stacks


@dataclass(frozen=True)
class Bounds:
    """When a place is overdue, in seconds: first_s, least_s and factor of recipe.watch; load_s of recipe.timeouts.

    collective_s: how long a rank may wait for another in an operation of a process group, wherever it is.
    """

    first_s: float
    least_s: float
    factor: float
    load_s: float = 0.0
    collective_s: float = float("inf")

    def of(self, seen: Seen, longest_s: float) -> float:
        """Return the bound of where `seen` is; longest_s: the longest time that any process was there before."""
        if _is_slow(seen.beat):
            return max(self.factor * longest_s, self.first_s, self.load_s)
        been_there = seen.beat.place in seen.beat.longest_s
        return max(self.factor * longest_s, self.least_s if been_there else self.first_s)

    def of_wait(self, seen: Seen) -> float:
        """Return the bound of a wait for another rank; where it may be for that rank's disk, as long as `of`."""
        return max(self.collective_s, self.first_s, self.load_s) if _is_slow(seen.beat) else self.collective_s

    def __str__(self) -> str:
        text = f"{self.first_s:.0f} s for a first time, then {self.least_s:.0f} s or {self.factor:g} x the longest time"
        return f"{text}; of a rank that waits for another in a process group: {self.collective_s:.0f} s"


def _is_slow(beat: Beat) -> bool:
    first_validation = beat.call == VALIDATE and beat.place not in beat.longest_s
    return beat.call in SLOW_CALLS or beat.phase in SLOW_PHASES or first_validation
