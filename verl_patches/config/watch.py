"""The sections recipe.watch, recipe.alarms and recipe.restart, and their rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_patches.values import Count, Factor, Natural, Positive, Share, Text


@dataclass
class Watch:
    """The watch of a run (docs/watch.md): which rank it waits for, and for how long it may.

    action: stop ends a run that stalls, report only logs and records it, off starts no heartbeats.
    first_s: bound of a phase that a process has not ended before, in seconds; for loading, for writing a checkpoint and
    for a trace at least recipe.timeouts.load_s, each time, for validation the first time.
    least_s: bound of a phase that it has ended before, whatever it took.
    factor: bound of a phase as a multiple of its longest duration so far on any rank, and on platform npu of the step
    model's seconds with prompts and responses of the largest length, the first time too. The largest bound holds.
    Whatever these say, a rank may wait for another in a process group for 0.8 of collective_timeout_minutes.
    """

    action: str = field(default="stop", metadata={"allowed": ("stop", "report", "off")})
    first_s: Positive = 1800.0
    least_s: Positive = 900.0
    factor: Factor = 5.0


@dataclass
class Alarms:
    """Named alarms over the record of each step (trainer/alarms.py). A bound of null switches its alarm off.

    action: warn prints and records an alarm, stop ends the run at the first one.
    expert_load: alarm expert_collapse where the largest load of an expert is above this multiple of the mean; needs
    recipe.expert_load.
    length_share: alarm length_collapse where responses are shorter than this share of the median of the first steps.
    at_limit: alarm length_limit where more than this share of the responses ends at the length limit.
    dlogp_factor: alarm dlogp_drift where the mean |dlogp| is above this multiple of the median of the first steps.
    baseline_steps: number of first steps of this process whose median is compared with; no such alarm before.
    """

    action: str = field(default="warn", metadata={"allowed": ("warn", "stop")})
    expert_load: Positive | None = 16.0
    length_share: Share | None = 0.25
    at_limit: Share | None = None
    dlogp_factor: Factor | None = 10.0
    baseline_steps: Count = 5


@dataclass
class Restart:
    """Starting a run again from its last checkpoint (launch/restart.py).

    times: how often at most; for a stall, a dead worker, a lost node or a failed connection, not for other errors.
    without_nodes: ids or addresses of nodes of a joined Ray (recipe.ray_address) on which nothing is placed. A restart
    adds the faulty one, if enough others are there.
    """

    times: Natural = 0
    without_nodes: list[Text] = field(default_factory=list)


def checks(config: Any, model: Any) -> Iterator[tuple[str, bool, str]]:
    """(name, whether it holds, detail) of each rule; none where nothing is restarted."""
    restart, trainer = config.recipe.restart, config.trainer
    if restart.without_nodes and config.recipe.ray_address is None:
        yield "restart", False, "recipe.restart.without_nodes is for a joined Ray; set recipe.ray_address, or remove it"
    if not restart.times:
        return
    faults = []
    if trainer.save_freq < 1:
        faults.append(f"trainer.save_freq is {trainer.save_freq}, so there is no checkpoint; set it to 1 or more")
    if trainer.resume_mode != "auto":
        faults.append(f"trainer.resume_mode is {trainer.resume_mode}; expected auto, which takes the newest checkpoint")
    text = f"at most {restart.times} times, from the newest checkpoint"
    detail = f"recipe.restart.times is {restart.times}, but {'; '.join(faults)}" if faults else text
    yield "restart", not faults, detail
