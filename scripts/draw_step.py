"""Draw one step of a plan as an SVG: which dies hold what, what moves, when, and the memory of the fullest die.

    python -m verl_patches plan deepseekv3_256die_true_weight --json | python scripts/draw_step.py docs/images/step.svg

All figures come from the plan, so they are modelled. Text stays text in the SVG: tests/scripts/test_draw_step.py
looks for it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

GB = 1e9
WIDTH, HEIGHT = 12.5, 8.6  # inches of 72 units: 900 units wide
# {what the picture calls a part of a die's memory: its groups in the plan, colour}; the last part is all the rest
PARTS = {
    "training weights": (("actor_params", "ref_params"), "#4c72b0"),
    "gradients": (("grads",), "#dd8452"),
    "optimizer, one part at a time": (("swap_window",), "#937860"),
    "activations": (("kept_activations", "working_activations", "engine_activations"), "#da8bc3"),
    "vLLM's weights": (("rollout_weights",), "#55a868"),
    "KV cache": (("kv_cache",), "#8cd17d"),
    "buffers of the reshard": (("reshard_buffers",), "#c44e52"),
    "HCCL, CANN, graphs, tensor cache": ((), "#bbbbbb"),
}
STAGE_COLOURS = "#dbe7f5 #c3d8ee".split()  # of even and odd pipeline stages
INSTANCE_COLOURS = "#d8efd9 #bfe3c1".split()
PHASES = {  # {phase of the plan's memory and step: its label}
    "reshard": "reshard",
    "rollout": "rollout",
    "reward": "reward",
    "ref": "reference",
    "advantage": "advantages",
    "update": "update",
}
HOST_PARTS = {"optimizer": "optimizer", "actor_params": "actor", "ref_params": "reference", "critic_params": "critic"}
MOVES = {  # {phase of the memory plan: what moves in it}
    "reshard": "host to dies: actor\ndie to die: {sync}\nin {collectives} collectives",
    "rollout": "controller to dies:\nprompts; at the end\nits memory is freed",
    "reward": "dies to controller:\nresponses, {responses}",
    "ref": "host to dies:\nreference model",
    "advantage": "controller to dies:\n{advantages}",
    "update": "host to dies: actor;\noptimizer to dies and\nback, part by part",
}


def labels(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the picture that hold figures of the plan, by a name for each."""
    step, traffic, host = plan["step"], plan["traffic"], plan["memory"]["host"]
    low, high = step["total_range_s"]
    dies, stages = _number_of_dies(plan), len(plan["train"]["layers"])
    times = {row["phase"]: row["range_s"] for row in step["phases"]}
    facts = {
        "sync": f"{traffic['weight_sync']['received_bytes'] / GB:.1f} GB a die",
        "collectives": traffic["weight_sync"]["collectives"],
        "responses": f"{traffic['dispatch_bytes']['generate'] / 1e6:.1f} MB",
        "advantages": f"{traffic['dispatch_bytes']['update'] / 1e3:.0f} kB",
    }
    parts = [f"{name} {host['bytes'][key] / GB:.0f} GB" for key, name in HOST_PARTS.items() if key in host["bytes"]]
    train, rollout = (plan[side]["layout"].partition(" @")[0] for side in ("train", "rollout"))
    copies = times["offload"]
    found = {
        "title": f"One GRPO step of {plan['config']} on {dies} dies: {low:.0f} to {high:.0f} s (modelled)",
        "train": f"Training: {train}, {stages} pipeline stages",
        "rollout": f"Rollout: {rollout}, {plan['rollout']['instances']} vLLM instances",
        "host": f"Host memory of a node: {', '.join(parts)}; with all else {host['node_bytes'] / GB:.0f} GB.",
        "offload": f"Copies between host and dies take {copies[0]:.0f} to {copies[1]:.0f} s of the step.",
        "capacity": f"{plan['memory']['hbm_bytes'] / GB:.1f} GB usable on a die",
    }
    for row in plan["memory"]["phases"]:
        if row["phase"] in PHASES:
            found[f"peak {row['phase']}"] = f"{row['peak_bytes'] / GB:.0f} GB"
    for phase, move in MOVES.items():
        found[f"move {phase}"] = move.format(**facts)
    for phase, label in PHASES.items():
        shown = dict.fromkeys(f"{second:.0f}" if second >= 10 else f"{second:.1f}" for second in times[phase])
        found[f"time {phase}"] = f"{label}\n{' to '.join(shown)} s"
    return found


def draw(plan: Mapping[str, Any]) -> Figure:
    """Return the picture of a plan, the JSON of `python -m verl_patches plan CONFIG --json`."""
    text = labels(plan)
    figure = Figure(figsize=(WIDTH, HEIGHT))
    figure.text(0.02, 0.972, text["title"], fontsize=15, weight="bold", va="top")
    layers, dies = plan["train"]["layers"], _number_of_dies(plan)
    train, rollout = figure.add_axes((0.02, 0.63, 0.44, 0.27)), figure.add_axes((0.54, 0.63, 0.44, 0.27))
    experts = {check["name"]: check["detail"].replace("a rank", "a die") for check in plan["checks"]}
    size, rows = dies // len(layers), []
    for stage, held in enumerate(layers):
        place = f"dies {stage * size}-{(stage + 1) * size - 1}"
        rows.append((place, f"layers {held[0]} to {held[-1]}; {experts['train experts']}"))
    _dies_grid(train, text["train"], rows, STAGE_COLOURS)
    held = f"a whole model; {experts.get('rollout experts', 'all experts a die')}"
    size = dies // plan["rollout"]["instances"]
    rows = [(f"dies {first}-{first + size - 1}", held) for first in range(0, dies, size)]
    _dies_grid(rollout, text["rollout"], rows, INSTANCE_COLOURS)
    arrow = FancyArrowPatch((0.467, 0.765), (0.533, 0.765), transform=figure.transFigure, arrowstyle="-|>")
    figure.add_artist(arrow).set(mutation_scale=22, color="black")
    figure.text(0.5, 0.785, "reshard", ha="center", fontsize=11)
    figure.text(0.5, 0.745, "the same\ndies", ha="center", fontsize=11, va="top")
    _time_bar(figure.add_axes((0.02, 0.53, 0.96, 0.045)), plan, text)
    _memory(figure.add_axes((0.055, 0.22, 0.925, 0.19)), plan, text)
    figure.text(0.02, 0.012, f"{text['host']}\n{text['offload']}", fontsize=11, va="bottom", linespacing=1.4)
    return figure


def _number_of_dies(plan: Mapping[str, Any]) -> int:
    return int(plan["train"]["layout"].partition("@")[2].split()[0])


def _dies_grid(axes: Axes, title: str, rows: Sequence[tuple[str, str]], colours: Sequence[str]) -> None:
    """Draw one band for each group of dies, first group on top: its dies, and what each of them holds."""
    for number, (dies, held) in enumerate(rows):
        axes.barh(-number, 1, height=0.92, color=colours[number % 2], edgecolor="#667788", linewidth=0.6)
        axes.text(0.02, -number, dies, va="center", fontsize=11)
        axes.text(0.98, -number, held, va="center", ha="right", fontsize=11)
    axes.set(xlim=(0, 1), ylim=(-len(rows) + 0.5, 0.5))
    axes.axis("off")
    axes.set_title(title, fontsize=12, loc="left", pad=5)


def _time_bar(axes: Axes, plan: Mapping[str, Any], text: Mapping[str, str]) -> None:
    """Draw the step's phases, as wide as their seconds but at least wide enough for nothing to vanish."""
    seconds = {row["phase"]: row["seconds"] for row in plan["step"]["phases"]}
    total, left = sum(seconds.values()), 0.0
    colours = ("#c44e52", "#55a868", "#bbbbbb", "#8172b3", "#bbbbbb", "#4c72b0")
    for phase, colour in zip(PHASES, colours, strict=True):
        width = max(seconds[phase] / total, 0.004)
        axes.barh(0, width, left=left, height=1, color=colour, edgecolor="white", linewidth=0.8)
        if width > 0.1:
            shown = text[f"time {phase}"].replace("\n", ", ")
            axes.text(left + width / 2, 0, shown, ha="center", va="center", color="white", fontsize=11)
        left += width
    axes.set(xlim=(0, left), ylim=(-0.5, 0.5))
    axes.axis("off")
    axes.set_title("When: one phase after another; its width shows its seconds", fontsize=12, loc="left", pad=5)


def _memory(axes: Axes, plan: Mapping[str, Any], text: Mapping[str, str]) -> None:
    """Draw the memory of the fullest die in each phase; below it what moves then."""
    rows = {row["phase"]: row for row in plan["memory"]["phases"]}
    for number, phase in enumerate(PHASES):
        peak, bottom = rows[phase]["peak_bytes"] / GB, 0.0
        for groups, colour in PARTS.values():
            size = sum(rows[phase]["bytes"].get(group, 0) for group in groups) / GB if groups else peak - bottom
            axes.bar(number, size, bottom=bottom, width=0.5, color=colour, edgecolor="white", linewidth=0.5)
            bottom += size
        axes.text(number, peak + 1, text[f"peak {phase}"], ha="center", fontsize=11)
        axes.text(number, -4, text[f"time {phase}"], ha="center", va="top", fontsize=11, weight="bold")
        axes.text(number, -23, text[f"move {phase}"], ha="center", va="top", fontsize=11)
    capacity = plan["memory"]["hbm_bytes"] / GB
    axes.axhline(capacity, color="#444444", linewidth=1, linestyle="--")
    axes.text(len(PHASES) - 0.52, capacity + 1.5, text["capacity"], ha="right", fontsize=10.5)
    axes.set(xlim=(-0.5, len(PHASES) - 0.5), ylim=(0, capacity * 1.15), xticks=[], ylabel="GB")
    axes.spines[["top", "right"]].set_visible(False)
    for name, (_, colour) in PARTS.items():
        axes.bar(0, 0, color=colour, label=name)
    place = {"loc": "lower left", "bbox_to_anchor": (-0.045, 1.06), "borderaxespad": 0}
    axes.legend(**place, ncol=4, fontsize=10.5, frameon=False)
    title = "What is on the fullest die in each phase, and what moves"
    axes.set_title(title, fontsize=12, loc="left", pad=46, x=-0.038)


def main(target: Path) -> None:
    """Draw the plan of standard input into the file `target`."""
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "step", "font.family": "sans-serif"})
    draw(json.load(sys.stdin)).savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
