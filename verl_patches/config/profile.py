"""The section `recipe.profile`: what is profiled in which step, and the rate that MFU is a share of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_patches.layout.parallel import world_size
from verl_patches.memory.schedule import SCHEDULE
from verl_patches.values import Count, Natural, Positive

ON_CONTROLLER = ("reward", "advantage")  # phases in which workers do nothing
PROFILED = tuple(phase.name for phase in SCHEDULE.phases if phase.name not in ON_CONTROLLER)


@dataclass
class Profile:
    """Traces of chosen steps, ranks and phases (worker/profile.py), and the peak rate of a device for MFU.

    steps: numbers of the steps that are profiled, as the step table counts them; null: none. Their times are not
    comparable, and medians of `report` leave them out.
    ranks: ranks that write traces.
    phases: phases of memory/schedule.py that they trace, but reward and advantage, which run on the controller; null:
    all of them.
    stacks: traces have Python stacks too, which makes them larger and the phases slower.
    peak_tflops: dense bf16 TFLOP/s of one device; null takes that of the platform (353.9 of an A3 die), and on a CPU,
    which has none, MFU is not printed (layout/flops.py).
    """

    steps: list[Count] | None = None
    ranks: list[Natural] = field(default_factory=lambda: [0])
    phases: list[str] | None = None
    stacks: bool = False
    peak_tflops: Positive | None = None


def phase_faults(phases: Any) -> Iterator[str]:
    """One sentence for each of `phases` that is none, or that workers have no part in."""
    for phase in phases or ():
        if phase not in PROFILED:
            why = "runs on the controller" if phase in ON_CONTROLLER else "is no phase of memory/schedule.py"
            yield f"recipe.profile.phases: {phase!r} {why}; expected some of {', '.join(PROFILED)}"


def checks(config: Any, model: Any) -> Iterator[tuple[str, bool, str]]:
    """(name, whether it holds, detail) of the section's rules; nothing where it is off."""
    section = config.recipe.profile
    if section.steps is None:
        return
    faults = list(_faults(section, world_size(config), config))
    yield from (("profile", False, fault) for fault in faults)
    if not faults:
        phases = ", ".join(section.phases or PROFILED)
        yield "profile", True, f"steps {list(section.steps)}, ranks {list(section.ranks)}: {phases}"


def _faults(section: Any, world: int, config: Any) -> Iterator[str]:
    key, last = "recipe.profile", config.trainer.total_training_steps
    for name in ("steps", "ranks"):
        if not section[name]:
            yield f"{key}.{name} is empty, so nothing is profiled; expected numbers, or {key}.steps=null"
    for rank in section.ranks:
        if rank >= world:
            yield f"{key}.ranks: {rank} is no rank; the run has ranks 0 to {world - 1}"
    for step in section.steps:
        if last is not None and step > last:
            yield f"{key}.steps: {step} comes after the last step, {last} (trainer.total_training_steps)"
    if config.recipe.train.skip_old_log_prob and "old_log_prob" in (section.phases or ()):
        yield f"{key}.phases: the run has no old_log_prob, as recipe.train.skip_old_log_prob is true"
