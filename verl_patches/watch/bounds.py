"""How long a process of a run may stay in one phase before it counts as a stall. No torch.

A place is a phase of a worker, or a call where it has no phases. Its bound is the larger of a least time and `factor`
times the time that is expected: the longest one so far on any rank, or the step model's (planning/step_model.py), which
on platform npu knows a long phase before it has been there once. A rank that waits for another in a process group has a
shorter bound, as HCCL would end it with an error that names only the rank that waited.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from verl_patches.layout.phases import LAST_CHECKPOINT, OF_WORKERS, PROFILE, VALIDATE
from verl_patches.watch.heartbeat import Beat
from verl_patches.watch.node import Seen

# They wait for the slowest disk, or analyse a trace: what they took before says nothing, so Bounds.load_s holds
SLOW_CALLS, SLOW_PHASES = {"init_model", "load_checkpoint", "finish_checkpoint"}, {LAST_CHECKPOINT, PROFILE}
WAIT_SHARE = 0.8  # of recipe.train.collective_timeout_minutes: the rest (216 s of 18 min) is left to collect stacks
# phase of a rank, or call of the controller while no rank is in one: phases of the step model that its time is of
MODELLED = {
    **{phase: (phase, "offload") for phase in OF_WORKERS},
    "wake_kv": ("offload",),
    "sleep": ("offload",),
    "reward": ("reward", "advantage"),
    "rm_scores": ("reward", "offload"),
    "compute_log_prob": ("advantage",),
    "compute_ref_log_prob": ("advantage",),
    "compute_values": ("advantage",),
}


@dataclass(frozen=True)
class Bounds:
    """When a place is overdue, in seconds: first_s, least_s and factor of recipe.watch; load_s of recipe.timeouts.

    collective_s: how long a rank may wait for another in an operation of a process group, wherever it is; modelled:
    {phase or call: seconds} by the step model; validation, which it does not know, has none.
    """

    first_s: float
    least_s: float
    factor: float
    load_s: float = 0.0
    collective_s: float = float("inf")
    modelled: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, seen: Seen, longest_s: float) -> float:
        """The bound of where `seen` is; longest_s: the longest time that any process was there before."""
        beat = seen.beat
        least_s = self.least_s if beat.place in beat.longest_s else self.first_s
        if _is_slow(beat):
            least_s = max(self.first_s, self.load_s)
        modelled_s = 0.0 if beat.call == VALIDATE else self.modelled.get(beat.phase or beat.call, 0.0)
        return max(self.factor * max(modelled_s, longest_s), least_s)

    def of_wait(self, seen: Seen) -> float:
        """The bound of a wait for another rank; where it may be for that rank's disk, as long as `of`."""
        return max(self.collective_s, self.first_s, self.load_s) if _is_slow(seen.beat) else self.collective_s

    def __str__(self) -> str:
        text = f"{self.first_s:.0f} s for a first time, then {self.least_s:.0f} s or {self.factor:g} x the longest time"
        over = {name: self.factor * seconds for name, seconds in self.modelled.items()}
        long = [f"{name} {seconds:.0f} s" for name, seconds in over.items() if seconds > self.least_s]
        text += f"; at least, modelled: {', '.join(long)}" if long else ""
        return f"{text}; of a rank that waits for another in a process group: {self.collective_s:.0f} s"


def _is_slow(beat: Beat) -> bool:
    first_validation = beat.call == VALIDATE and beat.place not in beat.longest_s
    return beat.call in SLOW_CALLS or beat.phase in SLOW_PHASES or first_validation
