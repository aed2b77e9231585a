"""Plot a run: training.png shows its reward and seconds by step, memory.png its memory by phase.

matplotlib is imported inside functions, so that commands that draw nothing do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.memory.schedule import MEMORY_GROUPS
from verl_patches.rewards.parts import REWARD_PREFIX
from verl_patches.run.record.report import PHASES, step_value, validations
from verl_patches.shared_files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAN = float("nan")  # matplotlib does not draw it
# a group has one colour in every picture, in the order of MEMORY_GROUPS; those of value models are lighter
_COLOURS = "#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #bcbd22 #17becf".split()
_COLOURS += "#aec7e8 #ffbb78 #98df8a #ff9896 #c5b0d5".split()
PHASE_COLOURS = {f"{phase} s": f"C{number}" for number, phase in enumerate(PHASES)}
COLOURS = dict(zip(MEMORY_GROUPS, _COLOURS, strict=True)) | PHASE_COLOURS
# lines of figures measured on the device: the allocator's peak, and the memory that all processes use
MEASURED_STYLES = {"peak": "-", "used": "--"}
_peak = itemgetter("peak_bytes")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure, without a suffix as a PNG, and return its path; ConfigError where it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as new:
            figure.savefig(new, format=path.suffix[1:] or "png", dpi=100)
    except (OSError, ValueError) as why:
        raise ConfigError(f"{path} cannot be written: {why}; give another file") from why
    return path


def _plain_name(name: str) -> str:
    """Return a run's name, shortened, with each $ escaped, which matplotlib would read as the start of TeX."""
    return (name if len(name) <= 40 else f"{name[:40]}...").replace("$", r"\$")


def _edges(numbers: Sequence[int]) -> list[float]:
    """Return the edges of columns that end half a step after each of these steps."""
    return [numbers[0] - 0.5, *(number + 0.5 for number in numbers)]


def _label_steps(axes: Axes, steps: Sequence[Mapping[str, Any]]) -> None:
    """Write whole steps below the axes, and draw a line where the run was resumed."""
    axes.set_xlabel("step")
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    for after in (step["resumed_after"] for step in steps if step.get("resumed_after")):
        axes.axvline(after + 0.5, color="0.4", linestyle="--", linewidth=1)
        place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "rotation": 90, "ha": "right", "va": "top"}
        axes.text(after + 0.5, 0.98, f"resumed after step {after}", fontsize=7, **place)


def _values(steps: Iterable[Mapping[str, Any]], name: str, lacking: float = NAN) -> list[float]:
    """Return the value that `step_value` has for `name` in each step, `lacking` where there is none."""
    values = [step_value(step, name) for step in steps]
    return [lacking if value is None else value for value in values]


def run_figure(summary: Mapping[str, Any]) -> Figure:
    """Draw reward and validation (left) and seconds per phase (right) of every step of a summary.json."""
    figure, name, steps = _figure(11, 4), _plain_name(str(summary["run"])), summary["steps"]
    left, right = figure.subplots(1, 2)
    trained = "loss" if steps[-1].get("objective") else "reward"  # on fixed data the loss shows if it learns
    numbers = [step["step"] for step in steps]
    _draw_curve(left, summary, trained)
    left.set(title=f"{name}: mean {trained}", ylabel=trained)
    parts = dict.fromkeys(label for step in steps for label in step.get("rewards") or {} if "/" not in label)
    for label in parts if len(parts) > 1 else ():
        left.plot(numbers, _values(steps, f"{REWARD_PREFIX}{label}"), linewidth=1, label=_plain_name(label))
    _stack(right, _edges(numbers), {phase: _values(steps, phase, 0.0) for phase in PHASE_COLOURS})
    right.set(title="seconds per phase", ylabel="s", ylim=(0, None))
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (left, right):
        _label_steps(axes, steps)
    if len(left.get_legend_handles_labels()[0]) > 1:
        left.legend(fontsize=8)
    return figure


def _draw_curve(axes: Axes, summary: Mapping[str, Any], name: str) -> None:
    """Draw `name` of every step, and its validations as a dashed line of the same colour."""
    numbers = [step["step"] for step in summary["steps"]]
    (line,) = axes.plot(numbers, _values(summary["steps"], name), marker=".", label=name)
    if found := validations(summary):
        scores = [NAN if val["score"] is None else val["score"] for _, val in found]
        axes.plot([step for step, _ in found], scores, "s--", color=line.get_color(), markersize=3, label="validation")
    axes.grid(alpha=0.3)


def memory_figure(summary: Mapping[str, Any]) -> Figure:
    """Draw tracked bytes by memory group: the highest phase of every step (left), each phase of one step (right).

    A phase is drawn as it was on the rank with its highest peak. The step on the right is the last of those with the
    highest peak. The black line is `held MB` of the report, the ledger's peak; grey lines are measured on the device,
    where it has such counters (RSS of a process is in summary.json only: it is much more than a tiny model's tensors).
    Steps without a ledger are gaps, and groups that are always empty are left out.
    """
    steps, name = summary["steps"], _plain_name(str(summary["run"]))
    phases = {step["step"]: (step.get("memory") or {}).get("phases") or {} for step in steps}
    highest = {number: max(found.values(), key=_peak, default=None) for number, found in phases.items()}
    figure = _figure(12, 4.5)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    present = {number: moment for number, moment in highest.items() if moment}
    shown = max(present, key=lambda number: (_peak(present[number]), number))
    unit, scale = ("GB", 1e9) if _peak(present[shown]) >= 1e9 else ("MB", 1e6)
    sizes = [moment["bytes"] for found in phases.values() for moment in found.values()]
    groups = [group for group in MEMORY_GROUPS if any(size.get(group) for size in sizes)]
    _draw_moments(left, _edges([*phases]), [*highest.values()], groups, scale)
    _label_steps(left, steps)
    left.set(title=f"{name}: highest phase of each step", ylabel=unit)
    detail = phases[shown]
    _draw_moments(right, _edges(range(len(detail))), [*detail.values()], groups, scale)
    right.set(title=f"phases of step {shown} (highest peak)", ylabel=unit)
    right.set_xticks(range(len(detail)), detail, rotation=30, ha="right", rotation_mode="anchor")
    figure.legend(*right.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def plan_figure(name: str, memory: Mapping[str, Any]) -> Figure:
    """Draw the modelled bytes of each phase's fullest die by memory group, in the order that the run follows.

    memory: of a plan. The line is what a die has. Groups that no ledger tracks are grey, on top.
    """
    phases = memory["phases"]
    present = dict.fromkeys(group for phase in phases for group in phase["bytes"])
    greys = {group: str(0.3 + 0.07 * n) for n, group in enumerate(each for each in present if each not in COLOURS)}
    groups = [*(group for group in MEMORY_GROUPS if group in present), *greys]
    figure, edges = _figure(11, 4.5), _edges(range(len(phases)))
    axes = figure.subplots()
    sizes = {group: [phase["bytes"].get(group, 0) / 1e9 for phase in phases] for group in groups}
    _stack(axes, edges, sizes, COLOURS | greys)
    if memory["hbm_bytes"] is not None:
        axes.axhline(memory["hbm_bytes"] / 1e9, color="black", linewidth=1.2, label="a die has")
    axes.set(title=f"{_plain_name(name)}: fullest die of each phase (modelled)", ylabel="GB", ylim=(0, None))
    axes.set_xticks(range(len(phases)), [phase["phase"] for phase in phases], rotation=30, ha="right")
    figure.legend(*axes.get_legend_handles_labels(), fontsize=8, loc="outside right upper")
    return figure


def _draw_moments(
    axes: Axes, edges: Sequence[float], moments: Sequence[Mapping[str, Any] | None], groups: Sequence[str], scale: float
) -> None:
    """Draw stacked areas of the groups' bytes, with peaks and measured lines over them.

    A moment is a phase's record in a step's `memory` (memory/ledger.py); None is a gap.
    """

    def sizes(measure: Callable[..., float]) -> list[float]:
        return [NAN if moment is None else measure(moment) / scale for moment in moments]

    _stack(axes, edges, {group: sizes(lambda moment, group=group: moment["bytes"].get(group, 0)) for group in groups})
    axes.stairs(sizes(_peak), edges, baseline=None, color="black", linewidth=1.2, label="held (peak)")
    for name, style in MEASURED_STYLES.items():
        measured = sizes(lambda moment, name=name: moment["measured"].get(name, NAN))
        if any(size == size for size in measured):
            axes.stairs(measured, edges, baseline=None, color="0.35", linestyle=style, label=f"measured {name}")
    axes.set_ylim(bottom=0)


def _stack(
    axes: Axes, edges: Sequence[float], layers: Mapping[str, Sequence[float]], colours: Mapping[str, str] = COLOURS
) -> None:
    """Draw areas of the layers, {label: sizes between the edges}, one on the other; NaN in all of them is a gap.

    A layer without a size above 0, such as the phases of a critic in a run without one, is left out.
    """
    below = [0.0] * (len(edges) - 1)
    for label, sizes in layers.items():
        if any(size > 0 for size in sizes):
            above = [low + size for low, size in zip(below, sizes, strict=True)]
            axes.stairs(above, edges, baseline=below, fill=True, color=colours[label], label=label)
            below = [size if size == size else 0.0 for size in above]
