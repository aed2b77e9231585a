"""PNG plots: reward and seconds of a run, memory by phase, traffic of a reshard plan.

matplotlib is imported inside functions: commands that draw nothing do not wait for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from verl_patches.reshard.plan import ReshardPlan

PHASES = ("rollout", "reshard", "reward", "log_prob", "ref", "advantage", "update")
LAST_STEPS = 12  # of the memory plot: more do not fit a page, and they repeat
GB = 1e9


def _figure(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plot_run(summary: dict[str, Any], path: Path) -> Path:
    """Reward (left) and seconds per phase (right) of every step of a summary.json, as a PNG; returns its path."""
    from matplotlib.ticker import MaxNLocator

    steps = summary["steps"]
    numbers = [s["step"] for s in steps]
    figure = _figure(11, 4)
    left, right = figure.subplots(1, 2)
    left.plot(numbers, [s["reward"] for s in steps], marker="o", markersize=3)
    left.set(title=f"{summary['run']}: mean reward", xlabel="step", ylabel="reward")
    left.grid(alpha=0.3)
    below = [0.0] * len(steps)
    for phase in PHASES:
        seconds = [s["seconds"].get(phase, 0.0) for s in steps]
        right.bar(numbers, seconds, bottom=below, label=phase)
        below = [a + b for a, b in zip(below, seconds, strict=True)]
    right.set(title="seconds per phase", xlabel="step", ylabel="s")
    right.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=100)
    return path


def draw_memory(summary: dict[str, Any], path: Path) -> Path:
    """Stacked bytes by memory group of every phase of the last steps (the rank with the highest peak), as a PNG.

    Black marks are the ledger's peaks, lines are measured: the allocator's peak and what all processes use of the
    device, or RSS on a CPU. Steps without a ledger, and groups that are always empty, are left out.
    """
    steps = [step for step in summary["steps"] if step.get("memory")][-LAST_STEPS:]
    moments = [(step["step"], name, found) for step in steps for name, found in step["memory"]["phases"].items()]
    unit, scale = ("GB", 1e9) if any(found["peak_bytes"] >= 1e9 for _, _, found in moments) else ("MB", 1e6)
    groups = list(dict.fromkeys(name for _, _, found in moments for name, size in found["bytes"].items() if size))
    figure = _figure(max(8, 0.35 * len(moments)), 5)
    axes, positions = figure.subplots(), range(len(moments))
    below = [0.0] * len(moments)
    for group in groups:
        sizes = [found["bytes"].get(group, 0) / scale for _, _, found in moments]
        axes.bar(positions, sizes, bottom=below, width=0.9, label=group)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    peaks = [found["peak_bytes"] / scale for _, _, found in moments]
    axes.plot(positions, peaks, "k_", markersize=12, label="ledger's peak")
    for name, style in (("peak", "-"), ("used", "--"), ("rss", "-")):
        measured = [found["measured"].get(name) for _, _, found in moments]
        if measured and all(measured):
            beside = axes.twinx() if name == "rss" else axes  # a process is much more than a tiny model's tensors
            sizes = [size / scale for size in measured]
            beside.plot(positions, sizes, color="0.4", linestyle=style, linewidth=0.8, label=f"measured {name}")
            beside.set(ylabel=f"measured {name}, {unit}")
    axes.set_xticks(positions, [f"{name} {step}" for step, name, _ in moments], rotation=90, fontsize=7)
    axes.set(title=f"{summary['run']}: memory by phase and step", ylabel=unit)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=100)
    return path


def draw_plan(plan: ReshardPlan, path: Path) -> Path:
    """Heat map of bytes from rank to rank (lines separate the training stages) and bytes per rank, as a PNG.

    Raises ConfigError for a path that cannot be written.
    """
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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=100)
    except (OSError, ValueError) as why:
        raise ConfigError(f"reshard-plan: --png {path} cannot be written: {why}; give another file") from why
    return path
