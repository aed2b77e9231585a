"""Print the plan of a run: on one screen, or all of its sections."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_patches.cli.output import PIPE_COLUMNS, print_command, print_table, print_text
from verl_patches.heartbeat.heartbeat import ranks_text
from verl_patches.patching.boot.install_prelude import LINE_NUMBER_NOTE
from verl_patches.plan.serving import serving_text
from verl_patches.spec import RunSpec
from verl_patches.values import size_text

SCREEN_LINES = 40
_SHOWN_FAULTS, _LABEL = 6, 11  # failed checks on a screen; columns of a label
_OVER_LIMIT = " TOO MUCH"
_PROCESS_LABELS = {"workers": "driver, workers", "driver": "driver", "node": "each worker"}
# Sections of a plan: title, key in --json, and the columns of its rows or the shown keys
_MEMORY_SECTIONS = (
    ("host memory of the fullest node (modelled)", "memory.host", ()),
    ("HCCL communicators, of two buffers each", "memory.communicators", ("side", "group", "ranks", "buffer_mib")),
)
_FIGURE_SECTIONS = (
    ("step (modelled, not measured); range: the errors on published runs (docs/plan.md)", "step.phases",
     ("phase", "range_s", "seconds", "quoted_s")),
    ("whole step", "step", ("total_range_s", "total_s", "quoted_total_s", "tokens_per_s_per_die_range")),
    ("rollout without (off) and with (on) rebalance, and with the fastest graph_batch_sizes", "step.tail", ()),
    ("assumptions", "step.assumed", ()),
    ("in no total: what an assumption would save (docs/profile.md)", "step.assumed_gains", ("if", "saves_s")),
    ("what a start reads and a save writes (modelled), at --disk-gb-s", "disk.parts", ("part", "bytes", "seconds")),
    ("step model on the published runs (docs/plan.md)", "step.calibration",
     ("row", "quoted_s", "modelled_s", "error", "fixes")),
    ("weight sync (modelled), the busiest die", "traffic.weight_sync", ()),
    ("sent by a die to others in a step (modelled)", "traffic.sent", ()),
    ("dispatch through the driver in a step (modelled)", "traffic.dispatch_bytes", ()),
    ("ports that each node needs free", "ports", ()),
)  # fmt: skip


def print_screen(plan: Mapping[str, Any], run: RunSpec | None) -> None:
    """Print a plan in at most SCREEN_LINES lines, with the next command; `run` is None where it has no layout."""
    title = plan["config"]
    if run is not None:
        trainer = run.verl.trainer
        title += f": {run.world_size} ranks on {trainer.nnodes} node(s) x {trainer.n_gpus_per_node}; line {run.line}"
        title += f", platform {run.platform}, level {run.recipe.level}"
    print_text(title, "bold")
    print_text(_labelled("", plan["verdict"], 3)[_LABEL:], "bold green" if plan["ok"] else "bold red")
    for label, text, lines in (*_fault_rows(plan["checks"]), *_figure_rows(plan)):
        print_text(_labelled(label, text, lines), "red" if label == "FAILED" else "")
    others = f", then {len(plan['next']) - 1} more commands (--all)" if len(plan["next"]) > 1 else ""
    for way in plan["next"][:1]:
        print_text(_labelled("next", f"{way['what']}{others}:", 2))
        print_command(way["command"])
    print_text("--all prints every check, rank, row, variable and command; --json all of it as data")


def _labelled(label: str, text: str, lines: int) -> str:
    """Return a label and a text beside it, wrapped and cut to a number of lines."""
    rows = textwrap.wrap(
        text, PIPE_COLUMNS - _LABEL, max_lines=lines, placeholder=" ... (--all)", break_on_hyphens=False
    )
    return textwrap.indent("\n".join(rows), " " * _LABEL).replace(" " * _LABEL, f"{label:{_LABEL}}", 1)


def _fault_rows(checks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str, int]]:
    """Yield (label, text, most lines) of failed checks, and of notes that refuse a start or are likely to end a run."""
    failed = [check for check in checks if not check["ok"]]
    for check in failed[:_SHOWN_FAULTS]:
        yield "FAILED", f"{check['name']}: {check['detail'].removeprefix(check['name'] + ': ')}", 3
    if len(failed) > _SHOWN_FAULTS:
        yield "FAILED", f"and {len(failed) - _SHOWN_FAULTS} more checks (--all)", 1
    for check in checks:
        if check["detail"].startswith("a start is refused"):
            yield check["name"], check["detail"], 4
    notes = [check["name"] for check in checks if check["note"] and not check["detail"].startswith("a start is")]
    if notes:
        yield "notes on", f"{', '.join(dict.fromkeys(notes))} (--all)", 1


def _figure_rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield (label, text, most lines) of what a plan has: layout, memory, KV cache, step, level, disk."""
    memory, step, level = plan["memory"], plan["step"], plan.get("level")
    for side in ("train", "rollout"):
        if plan[side]:
            yield side, plan[side]["layout"], 1
    if memory:
        yield from _memory_texts(memory)
    if step:
        low, high = step["total_range_s"]
        text = f"{low:.0f} to {high:.0f} s (modelled {step['total_s']:.0f}); ranges: errors on the published runs"
        yield "step", text, 1
        for phase in step["phases"]:
            if phase["seconds"]:
                low, high = phase["range_s"]
                text = f"{phase['phase']:14}{low:7.1f} to {high:7.1f} s  (modelled {phase['seconds']:.1f})"
                yield "", text, 1
        for gain in step["assumed_gains"]:
            yield "", f"{gain['if']}, then -{gain['saves_s']:.0f} s", 1
    if level:
        yield "level", _level_text(level), 3
    if plan["disk"] and plan["disk"]["parts"]:
        parts = (
            f"{each['part']} {size_text(each['bytes'])}, {each['seconds']:.0f} s" for each in plan["disk"]["parts"]
        )
        yield "disk", f"{'; '.join(parts)} (modelled, at {plan['disk']['gb_s']:g} GB/s of all nodes)", 2


def _memory_texts(memory: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    (order,) = (each for each in memory["orders"] if each["order"] == memory["followed"])
    fullest, hbm, host = (
        max(order["phases"], key=lambda phase: phase["peak_bytes"]),
        memory["hbm_bytes"],
        memory["host"],
    )
    text = f"fullest die {size_text(fullest['peak_bytes'])} in {fullest['phase']} (rank {fullest['rank']}, modelled)"
    if hbm is not None:
        text += f" of {size_text(hbm)}: {size_text(hbm - fullest['peak_bytes'])} left"
    yield "memory", text, 2
    if memory["recompute_layers"] is not None:
        layers = memory["recompute_layers"]
        text = ",".join(map(str, layers)) if isinstance(layers, list) else str(layers)
        yield "", f"recomputed layers of a stage: {text}", 1
    need, limit = host["node_bytes"] / 2**30, host["limit_bytes"]
    text = f"fullest node {need:.0f} GiB (modelled)"
    text += ", not compared: set recipe.memory.host_gib" if limit is None else f" of {limit / 2**30:.0f}"
    yield "", text if limit is None else f"{text}: {limit / 2**30 - need:.0f} left", 1
    if cache := memory["kv_cache"]:
        text = f"a die holds {cache['held_tokens']:,} tokens; {cache['sequences']} sequences need at most "
        text += f"{cache['needed_tokens']:,}, {cache['expected_tokens']:,} at their mean length (modelled): preemption "
        yield "KV cache", text + cache["preemption"], 2


def _level_text(level: Mapping[str, Any]) -> str:
    """Return the seconds of a step at another level, and what differs there."""
    text, keys = level["other"], dict.fromkeys(".".join(key.split(".")[-2:]) for key in level["keys"])
    if level["saves_s"] is not None:
        low, high = level["range_s"]
        change = f"{abs(level['saves_s']):.0f} s {'more' if level['saves_s'] > 0 else 'less'}"
        text += f": {low:.0f} to {high:.0f} s (modelled {level['total_s']:.0f}), {change}"
    return f"{text}; {len(level['rows'])} rows and {len(level['keys'])} keys differ: {', '.join(keys) or 'none'}"


def print_whole_plan(plan: dict[str, Any], run: RunSpec) -> None:
    """Print all sections of a plan (plan/plan.py) that it has, as tables."""
    memory, checks = plan["memory"], []
    for check in plan["checks"]:
        checks.append(
            (check["name"], ("note" if check["note"] else "ok") if check["ok"] else "FAILED", check["detail"])
        )
    print_table("checks", ("check", "", "detail"), checks)
    for side in ("train", "rollout"):
        print_table(f"{side}: {plan[side]['layout']}", ("", "ranks"), _layout_rows(plan[side]))
    if memory:
        print_table(*memory_rows(memory))
        for title, key, columns in _MEMORY_SECTIONS:
            _print_figures(plan, title, key, columns)
        print_text(f"not modelled: {'; '.join(memory['not_modelled'])}")
    if plan["inference"]:
        print_text(f"generate, chat, eval: {serving_text(plan['inference'])}", "bold")
    if not plan["step"] and run.recipe.hardware != "a3":
        print_text(f"step time is not modelled: no published run reports it for {run.hardware.title}", "bold")
    for title, key, columns in _FIGURE_SECTIONS:
        _print_figures(plan, title, key, columns)
    on = [(row["id"], row["kind"], row["target"], row["reason"]) for row in plan["patches"] if row["on"]]
    print_table(f"patches: {len(on)} of {len(plan['patches'])} rows on", ("id", "kind", "target", "why on"), on)
    values = {v["name"]: re.sub(r"rows=\S+", "rows=(the ids above)", v["value"]) for v in plan["environment"]}
    rows = [
        (
            f"{each['name']}={values[each['name']]}",
            _PROCESS_LABELS[each["where"]],
            f"{each['reason']} [{each['read_by']}]",
        )
        for each in plan["environment"]
    ]
    print_table("environment", ("variable", "set in", "reason [read by]"), rows)
    print_text(LINE_NUMBER_NOTE)
    refused = [check["name"] for check in plan["checks"] if check["detail"].startswith("a start is refused")]
    where = f"; a start is refused as long as the note on {', '.join(refused)} applies" if refused else ""
    print_text(f"commands to run, in this order{where}:", "bold")
    if any("HEAD" in command["command"] for command in plan["commands"]):
        print_text(
            "Replace HEAD and NODE by addresses that the other nodes reach, not 127.0.0.1. Each node needs the folders "
            "of PYTHONPATH and the model folder, and uses its own installed vllm, vllm-ascend and torch_npu"
        )
    for command in plan["commands"]:
        print_text(f"{command['where']}:", "bold")
        print_command(command["command"])


def _print_figures(plan: dict[str, Any], title: str, key: str, columns: Sequence[str] = ()) -> None:
    """Print the section `key` of a plan, a list of rows or a mapping of names; nothing where the plan lacks it."""
    found: Any = plan
    for name in key.split("."):
        found = (found or {}).get(name)
    if not found:
        return
    if isinstance(found, list):
        columns = [column for column in columns if column in found[0]]
        rows = [[_figure_text(row[column], column) for column in columns] for row in found]
        print_table(title, [_figure_label(column) for column in columns], rows)
    else:
        names = [name for name in columns or found if name in found]
        figures = [(_figure_label(name), _figure_text(found[name], f"{key}.{name}")) for name in names]
        print_table(title, ("", ""), figures)


def _figure_label(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ") if name.islower() else name


def _figure_text(value: Any, key: str) -> str:
    """Return a figure of a plan as text; its key says whether it is a size in bytes, and a list of two is a range."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_figure_text(each, f'{key}.{name}')}" for name, each in value.items())
    if isinstance(value, list):
        return (" to " if len(value) == 2 else ", ").join(map(str, value))
    if isinstance(value, int | float):
        return size_text(value) if "bytes" in key or key.startswith("traffic.sent") else f"{value or 0:.6g}"
    return "-" if value is None else str(value)


def _layout_rows(side: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of groups and stages, and the place of the first and the last rank of a layout."""
    rows = []
    for name, groups in side["groups"].items():
        shown = [f"[{ranks_text(group)}]" for group in groups[:3]]
        if len(groups) > 3:
            shown.append("...")
        rows.append((name, f"{len(groups)} of {len(groups[0])}: {' '.join(shown)}"))
    stages = ((f"stage {number}", layers) for number, layers in enumerate(side.get("layers", ())) if layers)
    rows += [(stage, f"layers {layers[0]}-{layers[-1]} ({len(layers)})") for stage, layers in stages]
    for place in (side["ranks"][0], side["ranks"][-1]):
        rows.append((f"rank {place['rank']}", _figure_text({k: v for k, v in place.items() if k != "rank"}, "")))
    return rows


def memory_rows(memory: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """Return title, columns and rows of a table: the peak of each phase on the worst rank, the followed order first."""
    hbm = memory["hbm_bytes"]
    orders = sorted(memory["orders"], key=lambda order: order["order"] != memory["followed"])

    def against_die(size_bytes: int) -> str:
        return size_text(size_bytes) + (_OVER_LIMIT if hbm is not None and size_bytes > hbm else "")

    rows = []
    for number, phase in enumerate(orders[0]["phases"]):
        peaks = [against_die(order["phases"][number]["peak_bytes"]) for order in orders]
        rows.append((phase["phase"], *peaks, _figure_text(phase["bytes"], "bytes")))
    limit = f"a die has {size_text(hbm)}" if hbm else "the KV cache is not modelled on this platform"
    rows.append(("highest", *(against_die(order["peak_bytes"]) for order in orders), limit))
    beside = "; those of the swapped optimizer come on top" if memory["swapped"] else ""
    for name, key in (("from host", "to_device_bytes"), ("to host", "to_host_bytes")):
        copied = f"copied in a step, worst rank{beside}"
        rows.append((name, *(size_text(order[key]["max"]) for order in orders), copied))
    rows.append(("empty_cache", *(str(order["empty_cache_calls"]) for order in orders), "calls in a step"))
    title = f"memory by phase (modelled), at the peak of the worst rank; this run follows {memory['followed']}"
    names = (order["order"].replace(", ", ",\n") for order in orders)
    return title, ("phase", *names, "memory groups, in the first order"), rows
