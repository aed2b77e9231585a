"""PNG plots: reward and seconds of one run or of several, memory by phase, traffic of a reshard plan.

Each picture is a Figure first, and a file then. matplotlib is imported inside functions: commands that draw nothing do
not wait for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.memory.schedule import MEMORY_GROUPS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from verl_patches.reshard.plan import ReshardPlan

PHASES = ("rollout", "reshard", "reward", "log_prob", "ref", "advantage", "update")
# a group has the same colour in every picture; nine that differ to the eye, in the order of MEMORY_GROUPS
_COLOURS = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #bcbd22 #17becf".split()
GROUP_COLOURS = dict(zip(MEMORY_GROUPS, _COLOURS, strict=True))
OTHER_COLOUR = "0.6"  # of a group that MEMORY_GROUPS does not have
MEASURED = {"peak": "-", "used": "--"}  # of the device: the allocator's peak, and what all processes use
GB = 1e9


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _text(summary: Mapping[str, Any]) -> str:
    """A run's name, in which matplotlib would read $ as the begin of TeX."""
    return str(summary["run"]).replace("$", r"\$")


def plot_run(summary: dict[str, Any], path: Path) -> Path:
    """`run_figure` as a PNG; returns its path."""
    run_figure(summary).savefig(path, dpi=100)
    return path


def run_figure(summary: dict[str, Any]) -> Figure:
    """Reward (left) and seconds per phase (right) of every step of a summary.json."""
    from matplotlib.ticker import MaxNLocator

    steps = summary["steps"]
    numbers = [s["step"] for s in steps]
    figure = _figure(11, 4)
    left, right = figure.subplots(1, 2)
    left.plot(numbers, _rewards(steps), marker="o", markersize=3)
    left.set(title=f"{_text(summary)}: mean reward", xlabel="step", ylabel="reward")
    left.grid(alpha=0.3)
    below = [0.0] * len(steps)
    for phase in PHASES:
        seconds = [s["seconds"].get(phase) or 0.0 for s in steps]
        right.bar(numbers, seconds, bottom=below, label=phase)
        below = [a + b for a, b in zip(below, seconds, strict=True)]
    right.set(title="seconds per phase", xlabel="step", ylabel="s")
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for after in filter(None, (step.get("resumed_after") for step in steps)):
            axes.axvline(after + 0.5, color="0.4", linestyle="--", linewidth=1)
            place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": "top"}
            axes.text(after + 0.5, 0.98, f"resumed after step {after}", fontsize=7, **place)
    return figure


def _rewards(steps: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of each step; NaN, which is not drawn, where it has none."""
    return [float("nan") if step["reward"] is None else step["reward"] for step in steps]


def plot_runs(summaries: Sequence[dict[str, Any]], path: Path) -> Path:
    """`runs_figure` as a PNG; returns its path."""
    runs_figure(summaries).savefig(path, dpi=100)
    return path


def runs_figure(summaries: Sequence[dict[str, Any]]) -> Figure:
    """Reward by step (left) and median seconds per phase (right) of several runs; the first step is left out."""
    figure = _figure(11, 4)
    left, right = figure.subplots(1, 2)
    names = [f"{number}: {_text(summary)}" for number, summary in enumerate(summaries, 1)]
    for name, summary in zip(names, summaries, strict=True):
        steps = summary["steps"]
        left.plot([s["step"] for s in steps], _rewards(steps), marker="o", markersize=3, label=name)
    left.set(title="mean reward", xlabel="step", ylabel="reward")
    left.grid(alpha=0.3)
    left.legend(fontsize=8)
    below = [0.0] * len(summaries)
    for phase in PHASES:
        timed = [summary["steps"][1:] or summary["steps"] for summary in summaries]
        seconds = [statistics.median(s["seconds"].get(phase) or 0.0 for s in steps) for steps in timed]
        right.bar(names, seconds, bottom=below, label=phase)
        below = [a + b for a, b in zip(below, seconds, strict=True)]
    right.set(title="median seconds per phase", ylabel="s")
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw_memory(summary: dict[str, Any], path: Path) -> Path:
    """`memory_figure` as a PNG; returns its path."""
    memory_figure(summary).savefig(path, dpi=100)
    return path


def memory_figure(summary: dict[str, Any]) -> Figure:
    """Tracked bytes by memory group: the highest phase of every step (left), each phase of one step (right).

    Each moment is of the rank with the phase's highest peak. The step on the right is the last of those with the
    highest peak. The black line is the ledger's peak; grey lines are measured on the device, where it has such
    counters (RSS of a process is in summary.json only: it is much more than a tiny model's tensors). Steps without a
    ledger are gaps, and groups that are always empty are left out.
    """
    from matplotlib.ticker import MaxNLocator

    phases = {step["step"]: step["memory"]["phases"] for step in summary["steps"] if step.get("memory")}
    figure = _figure(12, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    if not phases:
        figure.suptitle(f"{_text(summary)}: no step has a memory ledger")
        return figure
    highest = {step: max(found.values(), key=lambda phase: phase["peak_bytes"]) for step, found in phases.items()}
    shown = max(phases, key=lambda step: (highest[step]["peak_bytes"], step))
    unit, scale = ("GB", 1e9) if highest[shown]["peak_bytes"] >= 1e9 else ("MB", 1e6)
    sizes = [found["bytes"] for each in phases.values() for found in each.values()]
    groups = [name for name in MEMORY_GROUPS if any(size.get(name) for size in sizes)]
    groups += sorted({name for size in sizes for name in size if size[name]} - MEMORY_GROUPS.keys())
    numbers = range(min(phases), max(phases) + 1)
    _stack(left, [highest.get(step) for step in numbers], groups, numbers[0], scale)
    span = f"steps {numbers[0]} to {numbers[-1]}" if len(numbers) > 1 else f"step {numbers[0]}"
    left.set(title=f"{_text(summary)}: highest phase of each step, {span}", xlabel="step", ylabel=unit)
    left.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    detail = phases[shown]
    _stack(right, list(detail.values()), groups, 0, scale)
    right.set(title=f"phases of step {shown} (highest peak)", ylabel=unit)
    right.set_xticks(range(len(detail)), detail, rotation=30, ha="right", rotation_mode="anchor")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def _stack(
    axes: Axes, moments: Sequence[Mapping[str, Any] | None], groups: Sequence[str], first: int, scale: float
) -> None:
    """Stacked areas of the groups' bytes at first, first + 1, ...; peaks and measured lines over them. None: a gap."""
    nan = float("nan")
    edges = [first - 0.5 + number for number in range(len(moments) + 1)]
    below = [0.0] * len(moments)
    for group in groups:
        above = [
            nan if found is None else low + found["bytes"].get(group, 0) / scale
            for found, low in zip(moments, below, strict=True)
        ]
        colour = GROUP_COLOURS.get(group, OTHER_COLOUR)
        axes.stairs(above, edges, baseline=below, fill=True, color=colour, label=group)
        below = [0.0 if found is None else size for found, size in zip(moments, above, strict=True)]
    peaks = [nan if found is None else found["peak_bytes"] / scale for found in moments]
    axes.stairs(peaks, edges, baseline=None, color="black", linewidth=1.2, label="ledger's peak")
    for name, style in MEASURED.items():
        sizes = [nan if found is None else found["measured"].get(name, nan) / scale for found in moments]
        if any(size == size for size in sizes):
            axes.stairs(sizes, edges, baseline=None, color="0.35", linestyle=style, label=f"measured {name}")
    axes.set_xlim(edges[0], edges[-1])


def draw_plan(plan: ReshardPlan, path: Path) -> Path:
    """`plan_figure` as a PNG; returns its path. Raises ConfigError for a path that cannot be written."""
    figure = plan_figure(plan)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as why:
        raise ConfigError(f"reshard-plan: --png {path} cannot be written: {why}; give another file") from why
    return path


def plan_figure(plan: ReshardPlan) -> Figure:
    """Heat map of bytes from rank to rank (lines separate the training stages) and bytes per rank."""
    figure = _figure(15, 6.5)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.1))
    image = left.imshow([[n / 1e6 for n in row] for row in plan.traffic], cmap="viridis", interpolation="nearest")
    left.set(title="MB from training rank to rollout rank", xlabel="receives", ylabel="sends")
    figure.colorbar(image, ax=left, shrink=0.85)
    ranks = range(plan.world_size)
    for rank in ranks[1:]:
        if plan.stages[rank] != plan.stages[rank - 1]:
            left.axhline(rank - 0.5, color="white", linewidth=0.6)
            right.axvline(rank - 0.5, color="0.85", linewidth=0.8)
    sent, received, bound = (
        [n / GB for n in s] for s in (plan.sent_bytes, plan.received_bytes, plan.lower_bound_bytes)
    )
    right.plot(ranks, sent, ".", markersize=4, label="sent")
    right.plot(ranks, received, ".", markersize=4, label="received")
    right.step(ranks, bound, where="mid", linewidth=0.8, color="0.3", label="must arrive (bound)")
    right.axhline(sum(sent) / plan.world_size, linestyle="--", linewidth=0.8, label="mean sent")
    title = f"GB per rank, {plan.bucket_count} collectives of at most {plan.bucket_bytes / 2**20:.0f} MiB"
    right.set(title=title, xlabel="rank (lines separate the training stages)", ylabel="GB", ylim=(0, None))
    right.legend(fontsize=8)
    figure.suptitle(f"{plan.train} ({plan.train_library})  to  {plan.rollout} ({plan.rollout_library})", fontsize=10)
    return figure
