"""A picture of the device memory, by phase and step: the ledger's memory groups and the measured memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LAST_STEPS = 12  # more do not fit a page, and they repeat


def draw_memory(summary: dict[str, Any], path: Path) -> Path:
    """Stacked bytes by memory group of every phase of the last steps (the rank with the highest peak), as a PNG.

    Black marks are the ledger's peaks, lines are what was measured: the allocator's peak and what of the device is used
    by anybody, or RSS on a CPU. Steps without a ledger, and memory groups that never hold anything, are left out.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = [step for step in summary["steps"] if step.get("memory")][-LAST_STEPS:]
    moments = [(step["step"], name, found) for step in steps for name, found in step["memory"]["phases"].items()]
    unit, scale = ("GB", 1e9) if any(found["peak_bytes"] >= 1e9 for _, _, found in moments) else ("MB", 1e6)
    groups = list(dict.fromkeys(name for _, _, found in moments for name, size in found["bytes"].items() if size))
    figure = Figure(figsize=(max(8, 0.35 * len(moments)), 5), layout="constrained")
    FigureCanvasAgg(figure)  # matplotlib is imported here, as in plots.py
    axes, places = figure.subplots(), range(len(moments))
    below = [0.0] * len(moments)
    for group in groups:
        sizes = [found["bytes"].get(group, 0) / scale for _, _, found in moments]
        axes.bar(places, sizes, bottom=below, width=0.9, label=group)
        below = [a + b for a, b in zip(below, sizes, strict=True)]
    peaks = [found["peak_bytes"] / scale for _, _, found in moments]
    axes.plot(places, peaks, "k_", markersize=12, label="ledger's peak")
    for name, style in (("peak", "-"), ("used", "--"), ("rss", "-")):
        measured = [found["measured"].get(name) for _, _, found in moments]
        if measured and all(measured):
            beside = axes.twinx() if name == "rss" else axes  # a process is much more than a tiny model's tensors
            sizes = [size / scale for size in measured]
            beside.plot(places, sizes, color="0.4", linestyle=style, linewidth=0.8, label=f"measured {name}")
            beside.set(ylabel=f"measured {name}, {unit}")
    axes.set_xticks(places, [f"{name} {step}" for step, name, _ in moments], rotation=90, fontsize=7)
    axes.set(title=f"{summary['run']}: memory by phase and step", ylabel=unit)
    figure.legend(fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=100)
    return path
