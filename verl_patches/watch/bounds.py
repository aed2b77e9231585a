"""How long a process of a run may be in one place before it counts as a stall. No torch.

A place is a phase of a worker, or a call where it has no phases. Its bound is the larger of a least time and `factor`
times the time that is expected: the longest one so far on any rank, or the step model's (planning/step_model.py), which
on platform npu knows a long phase before it has been there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from verl_patches.watch.node import Seen

START, VALIDATE = "start", "validate"  # names of our own: until a process has started, and verl's validation
# They wait for the slowest disk, or analyse a trace: what they took before says nothing, so Bounds.load_s holds
SLOW_CALLS, SLOW_PHASES = {"init_model", "load_checkpoint", "finish_checkpoint"}, {"last checkpoint", "profile"}
# phase of a rank, or call of the controller while no rank is in one: phases of the step model that its time is of
MODELLED = {
    "reshard": ("reshard", "offload"),
    "wake_kv": ("offload",),
    "rollout": ("rollout", "offload"),
    "sleep": ("offload",),
    "old_log_prob": ("old_log_prob", "offload"),
    "ref": ("ref", "offload"),
    "update": ("update", "offload"),
    "reward": ("reward", "advantage"),
    "compute_log_prob": ("advantage",),
    "compute_ref_log_prob": ("advantage",),
}


@dataclass(frozen=True)
class Bounds:
    """When a place is overdue, in seconds: first_s, least_s and factor of recipe.watch; load_s of recipe.timeouts.

    modelled: {phase or call: seconds} by the step model; validation, which it does not know, has none.
    """

    first_s: float
    least_s: float
    factor: float
    load_s: float = 0.0
    modelled: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def of(self, seen: Seen, longest_s: float) -> float:
        """The bound of where `seen` is; longest_s: the longest time that any process was there before."""
        beat = seen.beat
        known = beat.place in beat.longest_s
        least_s = self.least_s if known else self.first_s
        if beat.call in SLOW_CALLS or beat.phase in SLOW_PHASES or (beat.call == VALIDATE and not known):
            least_s = max(self.first_s, self.load_s)
        modelled_s = 0.0 if beat.call == VALIDATE else self.modelled.get(beat.phase or beat.call, 0.0)
        return max(self.factor * max(modelled_s, longest_s), least_s)

    def __str__(self) -> str:
        text = f"{self.first_s:.0f} s for a first time, then {self.least_s:.0f} s or {self.factor:g} x the longest time"
        over = {name: self.factor * seconds for name, seconds in self.modelled.items()}
        long = [f"{name} {seconds:.0f} s" for name, seconds in over.items() if seconds > self.least_s]
        return text + (f"; at least, modelled: {', '.join(long)}" if long else "")
