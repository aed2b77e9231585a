"""Pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PHASES = ("rollout", "reshard", "reward", "log_prob", "ref", "advantage", "update")


def plot_run(summary: dict[str, Any], path: Path) -> Path:
    """Reward (left) and seconds per phase (right) of every step of a summary.json, as a PNG; returns its path."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = summary["steps"]  # matplotlib is imported here: commands that draw nothing do not wait for it
    numbers = [s["step"] for s in steps]
    figure = Figure(figsize=(11, 4), layout="constrained")
    FigureCanvasAgg(figure)
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
