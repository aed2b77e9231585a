"""Plots: reward and seconds of runs, memory by phase, errors of curves, traffic of a reshard plan; `save` makes PNGs.

A run of more than MOST steps is drawn in columns of several steps. matplotlib is imported inside functions: commands
that draw nothing do not wait for it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.evaluation.report import PHASES, medians, names_of, reduced, validations
from verl_patches.memory.schedule import MEMORY_GROUPS
from verl_patches.rewards.parts import METRIC
from verl_patches.shared_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from verl_patches.evaluation.compare import Error
    from verl_patches.evaluation.curves import Curves
    from verl_patches.reshard.plan import ReshardPlan

NAN = float("nan")  # is not drawn
MOST, MOST_OF_MANY = 200, 40  # columns of a picture of steps, and of more runs than LEGEND
SEAMS = 8  # that are named where a run was resumed
LEGEND = 10  # runs that a legend names; of more the names at the bars have the colours of the curves
NAME = 40  # characters of a run's name
# a group has the same colour in every picture, in the order of MEMORY_GROUPS; those of value models are lighter
_COLOURS = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #bcbd22 #17becf".split()
_COLOURS += "#aec7e8 #ffbb78 #98df8a #ff9896 #c5b0d5".split()
GROUP_COLOURS = dict(zip(MEMORY_GROUPS, _COLOURS, strict=True))
PHASE_COLOURS = {f"{phase} s": f"C{number}" for number, phase in enumerate(PHASES)}
OTHER_COLOUR = "0.6"  # of a group that MEMORY_GROUPS does not have
MEASURED = {"peak": "-", "used": "--"}  # of the device: the allocator's peak, and what all processes use
GB = 1e9
_peak = itemgetter("peak_bytes")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path) -> Path:
    """Write a figure, without a suffix as a PNG; returns its path. ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            figure.savefig(new, format=path.suffix[1:] or "png", dpi=100)
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} cannot be written: {why}; give another file") from why
    return path


def _text(name: str) -> str:
    """A run's name, in which matplotlib would read $ as the begin of TeX."""
    return (name if len(name) <= NAME else f"{name[:NAME]}...").replace("$", r"\$")


class _Columns:
    """The steps of a run in at most `most` columns of `width` consecutive ones; a column may have none."""

    def __init__(self, summary: Mapping[str, Any], most: int = MOST):
        self.name, steps = _text(str(summary["run"])), summary["steps"]
        numbers = [step["step"] for step in steps]
        first, span = min(numbers), max(numbers) - min(numbers) + 1
        self.width = -(-span // most)
        self.steps: list[list[Mapping[str, Any]]] = [[] for _ in range(-(-span // self.width))]
        for step in steps:
            self.steps[(step["step"] - first) // self.width].append(step)
        self.edges = [first - 0.5 + self.width * number for number in range(len(self.steps) + 1)]
        self.middles = [edge + self.width / 2 for edge in self.edges[:-1]]
        scores = [(step, val["score"]) for step, val in validations(summary)]
        self.validations = [(step, NAN if score is None else score) for step, score in scores]
        self.parts = [*dict.fromkeys(label for step in steps for label in step.get("rewards") or {})]  # of the reward
        self.seams = [step["resumed_after"] for step in steps if step.get("resumed_after")]
        self.each = "" if self.width == 1 else f", means of {self.width} steps"

    def means(self, name: str, lacking: float = NAN, of: Callable = statistics.fmean) -> list[float]:
        """Of a name of evaluation/report.py in each column; `lacking` where its steps do not have it."""
        values = [reduced(steps, name, of) if steps else NAN for steps in self.steps]
        return [lacking if value is None else value for value in values]

    def label(self, axes: Axes) -> None:
        """Whole steps below the axes, and a line where the run was resumed."""
        from matplotlib.ticker import MaxNLocator

        axes.set(xlabel="step", xlim=(self.edges[0], self.edges[-1]))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        for number, after in enumerate(self.seams):
            axes.axvline(after + 0.5, color="0.4", linestyle="--", linewidth=1)
            if number < SEAMS:
                place = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": "top"}
                axes.text(after + 0.5, 0.98, f"resumed after step {after}", fontsize=7, **place)


def run_figure(summary: Mapping[str, Any]) -> Figure:
    """Reward, validation (left) and seconds per phase (right) of every step of a summary.json, of a long run means."""
    figure = _figure(11, 4)
    left, right = figure.subplots(1, 2)
    columns, name = _Columns(summary), _trained([summary])
    _draw_curve(left, columns, name)
    left.set(title=f"{columns.name}: mean {name}{columns.each}", ylabel=name)
    for label in columns.parts if len(columns.parts) > 1 else ():
        left.plot(columns.middles, columns.means(f"{METRIC}{label}"), linewidth=1, label=_text(label))
    if columns.width > 1:
        left.fill_between(columns.middles, columns.means(name, of=min), columns.means(name, of=max), alpha=0.2)
    _stack(right, columns.edges, {name: columns.means(name, 0.0) for name in PHASE_COLOURS})
    right.set(title=f"seconds per phase{columns.each}", ylabel="s", ylim=(0, None))
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (left, right):
        columns.label(axes)
    if columns.validations:
        left.set_xlim(left=min(columns.edges[0], columns.validations[0][0] - 0.5))
    if columns.validations or len(columns.parts) > 1:
        left.legend(fontsize=8)
    return figure


def _trained(summaries: Sequence[Mapping[str, Any]]) -> str:
    """The name of the curve that says whether the runs learn: the reward, or on fixed data the loss."""
    fixed = all(summary["steps"][-1].get("objective") for summary in summaries)
    return "loss" if fixed else "reward"


def _draw_curve(axes: Axes, columns: _Columns, name: str, **style: Any) -> None:
    """Means of `name`, and as a dashed line of the same colour the validations."""
    marker = "o" if columns.width == 1 else ""
    (line,) = axes.plot(columns.middles, columns.means(name), marker=marker, markersize=3, **{"label": name, **style})
    if columns.validations:
        of_line = {"color": line.get_color(), "linewidth": line.get_linewidth(), "label": "validation"}
        axes.plot(*zip(*columns.validations, strict=True), linestyle="--", marker="s", markersize=3, **of_line)
    axes.grid(alpha=0.3)


def runs_figure(summaries: Sequence[Mapping[str, Any]]) -> Figure:
    """Reward by step (left) and the report's median seconds per phase (right) of several runs."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    count, many = len(summaries), len(summaries) > LEGEND
    figure = _figure(12, max(4, 1.5 + 0.25 * count))
    left, right = figure.subplots(1, 2)
    names = [_text(name) for name in names_of(summaries)]
    colours = [colormaps["turbo"](n / (count - 1)) if many else f"C{n}" for n in range(count)]
    trained = _trained(summaries)
    for name, colour, summary in zip(names, colours, summaries, strict=True):
        columns = _Columns(summary, MOST_OF_MANY if many else MOST)
        _draw_curve(left, columns, trained, color=colour, label=name, linewidth=1)
    left.set(title=f"mean {trained}", xlabel="step", ylabel=trained)
    left.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    seconds = [medians(summary["steps"], PHASE_COLOURS) for summary in summaries]
    edges = [number - 0.5 for number in range(count + 1)]
    _stack(right, edges, {name: [of[name] or 0.0 for of in seconds] for name in PHASE_COLOURS}, "horizontal")
    for edge in edges:
        right.axhline(edge, color="white", linewidth=3)
    right.set_yticks(range(count), names)
    right.set(title="median seconds per phase", xlabel="s", xlim=(0, None), ylim=(count - 0.5, -0.5))
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for label, colour in zip(right.get_yticklabels(), colours, strict=True):
        label.set_color(colour)
    if not many:
        left.legend(fontsize=8)
    return figure


def memory_figure(summary: Mapping[str, Any]) -> Figure:
    """Tracked bytes by memory group: the highest phase of every step (left), each phase of one step (right).

    Each moment is of the rank with the phase's highest peak; of a long run the highest of several steps. The step on
    the right is the last of those with the highest peak. The black line is `held MB` of the report, the ledger's peak;
    grey lines are measured on the device, where it has such counters (RSS of a process is in summary.json only: it is
    much more than a tiny model's tensors). Steps without a ledger are gaps, and groups that are always empty are left
    out.
    """
    phases = {step["step"]: step["memory"]["phases"] for step in summary["steps"] if step.get("memory")}
    figure = _figure(12, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    if not phases:
        figure.suptitle(f"{_text(str(summary['run']))}: no step has a memory ledger")
        return figure
    columns = _Columns({**summary, "steps": [step for step in summary["steps"] if step.get("memory")]})
    highest = {step: max(of_step.values(), key=_peak) for step, of_step in phases.items()}
    shown = max(phases, key=lambda step: (_peak(highest[step]), step))
    unit, scale = ("GB", 1e9) if _peak(highest[shown]) >= 1e9 else ("MB", 1e6)
    sizes = [of_step["bytes"] for each in phases.values() for of_step in each.values()]
    groups = [name for name in MEMORY_GROUPS if any(size.get(name) for size in sizes)]
    groups += sorted({name for size in sizes for name in size if size[name]} - MEMORY_GROUPS.keys())
    of_columns = [max((highest[step["step"]] for step in steps), key=_peak, default=None) for steps in columns.steps]
    _draw_moments(left, columns.edges, of_columns, groups, scale)
    span = f"steps {min(phases)} to {max(phases)}" if len(phases) > 1 else f"step {shown}"
    each = "each step" if columns.width == 1 else f"every {columns.width} steps"
    columns.label(left)
    left.set(title=f"{columns.name}: highest phase of {each}, {span}", ylabel=unit)
    detail = phases[shown]
    edges = [number - 0.5 for number in range(len(detail) + 1)]
    _draw_moments(right, edges, list(detail.values()), groups, scale)
    right.set(title=f"phases of step {shown} (highest peak)", ylabel=unit, xlim=(edges[0], edges[-1]))
    right.set_xticks(range(len(detail)), detail, rotation=30, ha="right", rotation_mode="anchor")
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def _draw_moments(
    axes: Axes, edges: Sequence[float], moments: Sequence[Mapping[str, Any] | None], groups: Sequence[str], scale: float
) -> None:
    """Stacked areas of the groups' bytes; peaks and measured lines over them. None: a gap."""

    def sizes(of: Callable[[Mapping[str, Any]], float]) -> list[float]:
        return [NAN if moment is None else of(moment) / scale for moment in moments]

    _stack(axes, edges, {group: sizes(lambda moment, group=group: moment["bytes"].get(group, 0)) for group in groups})
    axes.stairs(sizes(_peak), edges, baseline=None, color="black", linewidth=1.2, label="held (peak)")
    for name, style in MEASURED.items():
        measured = sizes(lambda moment, name=name: moment["measured"].get(name, NAN))
        if any(size == size for size in measured):
            axes.stairs(measured, edges, baseline=None, color="0.35", linestyle=style, label=f"measured {name}")
    axes.set_ylim(bottom=0)


def _stack(
    axes: Axes, edges: Sequence[float], layers: Mapping[str, Sequence[float]], orientation: str = "vertical"
) -> None:
    """Areas of the layers, {label: sizes between the edges}, one on the other; NaN in all of them is a gap.

    A layer without a size above 0, such as the phases of a critic in a run without one, is left out.
    """
    below = [0.0] * (len(edges) - 1)
    for label, sizes in layers.items():
        if not any(size > 0 for size in sizes):
            continue
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        colour = (GROUP_COLOURS | PHASE_COLOURS).get(label, OTHER_COLOUR)
        axes.stairs(above, edges, baseline=below, fill=True, color=colour, label=label, orientation=orientation)
        below = [size if size == size else 0.0 for size in above]


def errors_figure(a: Curves, b: Curves, errors: Sequence[Error], limits: Mapping[str, float]) -> Figure:
    """A row for each metric: both curves (left), |a - b| at the common steps with its mean and its limit (right)."""
    figure = _figure(11, 0.5 + 2.6 * len(errors))
    for error, (left, right) in zip(errors, figure.subplots(len(errors), 2, squeeze=False), strict=True):
        of_a, of_b = (source.values[error.metric] for source in (a, b))
        common = {step: abs(of_a[step] - of_b[step]) for step in of_a.keys() & of_b.keys()}
        lines = [
            (left, of_a, f"a: {Path(a.name).name}"),
            (left, of_b, f"b: {Path(b.name).name}"),
            (right, common, "|a - b|"),
        ]
        for axes, curve, label in lines:
            style = {"linestyle": "--" if curve is of_b else "-", "marker": "." if len(curve) <= MOST else ""}
            axes.plot(*zip(*sorted(curve.items()), strict=True), linewidth=1, label=_text(label), **style)
        means = {"mean": error.absolute, "limit of the mean": limits.get(error.metric)}
        for number, (label, value) in enumerate(means.items(), 1):
            if value is not None and math.isfinite(value):
                right.axhline(value, color=f"C{number}", label=f"{label} {value:.3g}")
        left.set(title=_text(error.metric), xlabel="step")
        right.set(title=f"{_text(error.metric)}: error", xlabel="step", ylim=(0, None))
        for axes in (left, right):
            axes.grid(alpha=0.3)
            axes.legend(fontsize=7)
    return figure


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
