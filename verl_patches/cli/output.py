"""How commands print: tables, a Report, and the plan of a run, for people or as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_patches.catalog import ROWS
from verl_patches.config.checks import Check
from verl_patches.layout.parallel import world_size
from verl_patches.patching.install_prelude import PLACES
from verl_patches.patching.report import Report
from verl_patches.planning.plan import build_plan
from verl_patches.planning.remedies import remedies
from verl_patches.planning.step_plan import Workload
from verl_patches.upstream.checkouts import Trees
from verl_patches.values import printable

Json = Annotated[bool, typer.Option("--json", help="Plain JSON on standard output.")]
_WIDTH = 200  # columns in pipes and files
_SET_IN = {"workers": "driver, workers", "driver": "driver", "node": "each worker"}


def print_json(data: Any) -> None:
    """Print `data` as JSON, indented."""
    typer.echo(json.dumps(data, indent=1))


def leave_with(report: Report, as_json: bool, fine: bool = True) -> NoReturn:
    """Print a report, as JSON or as a table (`fine`: its fine findings too), and exit with its code."""
    if as_json:
        print_json(report.as_dict())
    else:
        show(report, fine)
    raise typer.Exit(report.exit_code)


def show(report: Report, fine: bool = True) -> None:
    """Print a table of findings, the details of those that are not fine, and one line of counts."""
    if report.state == "empty":
        typer.echo(f"{report.command}: no row for {report.about}: nothing was checked")
        return
    title = f"{report.command}, {report.about}"
    shown = [finding for finding in report.findings if fine or finding.state != "fine"]
    if shown:
        places = [" ".join(filter(None, (f.found, f.where and f"[{f.where}]"))) for f in shown]
        rows = [(f.state, f.name, f.expected, place, f.todo) for f, place in zip(shown, places, strict=True)]
        red = {number for number, finding in enumerate(shown) if finding.state == "problem"}
        table(title, ("", "name", "expected", "found", "what to do"), rows, red)
    for finding in shown:
        for detail in finding.details:
            typer.echo(f"{finding.name}: {detail}")
    counts = ", ".join(f"{count} {state}" for state, count in report.as_dict()["counts"].items())
    typer.echo(f"{title}: {counts}")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], red: Iterable[int] = ()) -> None:
    """Print a table, 200 columns wide in pipes and files so that ids stay whole; `red`: row numbers."""
    head = Text(printable(title), style="bold")  # a str would be read as Rich's markup
    made, red = Table(title=head, title_justify="left", box=None, pad_edge=False), set(red)
    for column in columns:
        made.add_column(Text(printable(column)), overflow="fold")
    for number, row in enumerate(rows):
        made.add_row(*[Text(printable(cell, keep="\n"), style="red" if number in red else "") for cell in row])
    console().print(made)


def console() -> Console:
    """The terminal, or a wide console in pipes and files."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


# the plan of a run (planning/plan.py)


def report_plan(
    config: DictConfig, config_name: str, overrides: Sequence[str], trees: Trees, workload: Workload, as_json: bool
) -> NoReturn:
    """Print the plan of a run, for what is refused a change that mends it, and exit with 0, or 1 if a check failed."""
    plan = build_plan(config, config_name, overrides, ROWS, trees, workload)
    plan["remedies"] = remedies(config, [Check(**check) for check in plan["checks"]])
    if as_json:
        print_json(plan)
    else:
        show_plan(plan, config)
    for check in plan["checks"]:
        if not check["ok"]:
            typer.echo(f"verl_patches: {check['name']}: {check['detail']}", err=True)
    for remedy in plan["remedies"]:
        typer.echo(f"verl_patches: {remedy['check']} holds with: {shlex.join(remedy['overrides'])}", err=True)
    raise typer.Exit(0 if plan["ok"] else 1)


def show_plan(plan: dict[str, Any], config: DictConfig) -> None:
    """Print a plan as tables."""
    out = console()
    out.print(
        f"[bold]{plan['config']}[/]: "
        f"{world_size(config)} ranks on {config.trainer.nnodes} node(s) x {config.trainer.n_gpus_per_node}; "
        f"line {config.recipe.line}, platform {config.recipe.platform}",
        highlight=False,
    )
    failed = [number for number, check in enumerate(plan["checks"]) if not check["ok"]]
    table("checks", ("check", "", "detail"), [(c["name"], _state(c), c["detail"]) for c in plan["checks"]], failed)
    for side in ("train", "rollout"):
        if plan[side]:
            table(f"{side}: {plan[side]['layout']}", ("", "ranks"), _side_rows(plan[side]))
    if plan["memory"]:
        table(*memory_rows(plan["memory"]))
        table(*other_memory_rows(plan["memory"]))
    if plan["step"]:
        table(*step_rows(plan["step"]))
        table(*calibration_rows(plan["step"]["calibration"]))
    if plan["traffic"]:
        table("traffic (modelled) and ports", ("", ""), _traffic_rows(plan))
    on = [(row["id"], row["kind"], row["target"], row["reason"]) for row in plan["patches"] if row["on"]]
    table(f"patches: {len(on)} of {len(plan['patches'])} rows on", ("id", "kind", "target", "why on"), on)
    rows = [(v["name"], v["value"], _SET_IN[v["where"]], v["reason"], v["read_by"]) for v in plan["environment"]]
    table("environment", ("name", "value", "set in", "reason", "read by"), rows)
    out.print(PLACES, highlight=False, soft_wrap=True)
    refused = [c["name"] for c in plan["checks"] if not c["ok"] or c["detail"].startswith("a start is refused")]
    title = "commands to type, in this order:"
    if refused:
        title = f"commands, once the checks above that refuse a start hold ({', '.join(refused)}):"
    out.print(title, style="bold", highlight=False)
    if any("HEAD" in command["command"] for command in plan["commands"]):
        out.print(
            "HEAD and NODE stand for addresses of your nodes that the other nodes reach, not 127.0.0.1. Each "
            "node needs the folders of PYTHONPATH and the model's; vllm, vllm-ascend and torch_npu are those "
            "installed there",
            highlight=False,
        )
    for command in plan["commands"]:
        out.print(f"[bold]{command['where']}[/]:", highlight=False)
        out.print(f"  {command['command']}", highlight=False, markup=False, soft_wrap=True)


def _state(check: dict[str, Any]) -> str:
    return "note" if check["note"] else "ok" if check["ok"] else "FAILED"


def _side_rows(side: dict[str, Any]) -> list[tuple[str, str]]:
    """Groups, stages, and the first and the last rank of a layout."""
    rows = [(name, compact(groups)) for name, groups in side["groups"].items()]
    stages = ((f"stage {number}", layers) for number, layers in enumerate(side.get("layers", ())) if layers)
    rows += [(stage, f"layers {layers[0]}-{layers[-1]} ({len(layers)})") for stage, layers in stages]
    first, last = side["ranks"][0], side["ranks"][-1]
    for entry in (first,) if first is last else (first, last):
        text = " ".join(f"{key}{value}" for key, value in entry.items() if key not in ("rank", "experts"))
        if "experts" in entry:
            text += f" experts {entry['experts'][0]}-{entry['experts'][1]}"
        rows.append((f"rank {entry['rank']}", text))
    return rows


def compact(groups: Sequence[Sequence[int]], shown: int = 3) -> str:
    """Groups in one line: "64 groups of 4: [0-3] [4-7] [8-11] ..."; a regular stride is written [0-252:4]."""
    text = " ".join(f"[{_span(group)}]" for group in groups[:shown])
    more = " ..." if len(groups) > shown else ""
    noun = "groups" if len(groups) > 1 else "group"
    return f"{len(groups)} {noun} of {len(groups[0])}: {text}{more}"


def _span(ranks: Sequence[int]) -> str:
    steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) > 2 and len(steps) == 1:
        step = steps.pop()
        return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def memory_rows(memory: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """(title, columns, rows) of a table: peak of each phase on the worst rank, one column an order.

    The order that the run follows is the first column; one with the same figures as it has no column.
    """
    hbm = memory["hbm_bytes"]
    first, *others = sorted(memory["orders"], key=lambda order: order["order"] != memory["followed"])
    equal = [order["order"] for order in others if _figures(order) == _figures(first)]
    orders = [first, *(order for order in others if order["order"] not in equal)]
    unit, scale = ("GB", 1e9) if max(order["peak_bytes"] for order in orders) >= 1e9 else ("MB", 1e6)

    def text(size_bytes: float) -> str:
        return f"{size_bytes / scale:.2f}" if size_bytes else "-"

    def against_die(size_bytes: int) -> str:
        return text(size_bytes) + (" TOO MUCH" if hbm is not None and size_bytes > hbm else "")

    rows = []
    for number, phase in enumerate(first["phases"]):
        groups = " ".join(f"{group} {text(size)}" for group, size in phase["bytes"].items())
        peaks = [against_die(order["phases"][number]["peak_bytes"]) for order in orders]
        rows.append((phase["phase"], *peaks, groups))
    limit = f"a die has {text(hbm)}" if hbm else "the KV cache is not modelled on this platform"
    rows.append(("highest", *(against_die(order["peak_bytes"]) for order in orders), limit))
    moved = [f"{text(order['to_device_bytes']['max'])}, {text(order['to_host_bytes']['max'])}" for order in orders]
    beside = "; those of the swapped optimizer come on top" if memory["swapped"] else ""
    rows.append(("from, to host", *moved, f"{unit} copied in a step, worst rank{beside}"))
    rows.append(("empty_cache", *(str(order["empty_cache_calls"]) for order in orders), "calls in a step"))
    same = "".join(f"; {order}: the same bytes" for order in equal)
    title = (
        f"memory by phase (modelled): {unit} at the peak of the worst rank; this run follows {memory['followed']}{same}"
    )
    return title, ("phase", *(order["order"] for order in orders), f"memory groups, in {first['order']}"), rows


def other_memory_rows(memory: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """(title, columns, rows) of a table: pinned host memory of a node, HCCL's communicators, what is not modelled."""
    host, rows = memory["host"], []
    parts = " ".join(f"{group} {size / 1e9:.2f}" for group, size in host["bytes"].items())
    limit = "not compared: recipe.memory.host_gib is null"
    if host["limit_bytes"] is not None:
        limit = f"a node has {host['limit_bytes'] / 1e9:.2f}"
        limit += " TOO MUCH" if host["node_bytes"] > host["limit_bytes"] else ""
    rows.append(("pinned host memory of the fullest node", f"{host['node_bytes'] / 1e9:.2f}", f"{parts}; {limit}"))
    for side in ("train", "rollout"):
        held = [each for each in memory["communicators"] if each["side"] == side]
        if held:
            size = sum(2 * each["buffer_mib"] * 2**20 for each in held)
            groups = " ".join(f"{each['group']}({each['ranks']}) 2x{each['buffer_mib']}MiB" for each in held)
            rows.append((f"HCCL buffers of {side}", f"{size / 1e9:.2f}", groups))
    rows.append(("not modelled", "-", "; ".join(memory["not_modelled"])))
    return "memory beside the groups (modelled): GB", ("what", "GB", "parts"), rows


def step_rows(step: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """(title, columns, rows) of a table: seconds of each phase."""
    assumed = step["assumed"]
    tokens = f"prompts of {assumed['prompt_tokens']} and responses of {assumed['response_tokens']} tokens in the mean"
    phases = [(phase["phase"], f"{phase['seconds']:.2f}") for phase in step["phases"] if phase["seconds"]]
    speed = f"{step['total_s']:.2f}, {step['tokens_per_s_per_die']:.1f} tokens/s of each die"
    rows = [*phases, ("total", speed), ("assumed", f"{tokens}, DP syncs over {assumed['dp_sync']}")]
    rows += [("bounds of the watch", step["watch"])] if "watch" in step else []
    return "step (modelled, not measured)", ("phase", "seconds"), rows


def calibration_rows(rows: Iterable[dict[str, Any]]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """(title, columns, rows) of a table: the step model's error on each published row."""
    cells = [
        (
            row["row"],
            f"{row['quoted_s']:g}",
            f"{row['modelled_s']:g}",
            f"{100 * row['error']:+.1f} %",
            row["fixes"] or "-",
        )
        for row in rows
    ]
    return "step model on the published rows (docs/plan.md)", ("row", "quoted s", "modelled s", "error", "fixes"), cells


def _traffic_rows(plan: dict[str, Any]) -> list[tuple[str, str]]:
    sync, dispatch = plan["traffic"]["weight_sync"], plan["traffic"]["dispatch_bytes"]
    busiest = f"{sync['received_bytes'] / 1e9:.2f} GB in, {sync['sent_bytes'] / 1e9:.2f} out, the busiest die of each"
    rows = [("weight sync", f"{busiest}; {sync['collectives']} collectives")]
    rows += [(f"dispatch of {name}", f"{size / 1e9:.3f} GB through the driver") for name, size in dispatch.items()]
    for name, (first, last) in (plan["ports"] or {}).items():
        rows.append((f"ports, {name}", f"{first} to {last}"))
    return rows


def _figures(order: dict[str, Any]) -> tuple[Any, ...]:
    """What the table shows of an order, except its calls of empty_cache."""
    peaks = [phase["peak_bytes"] for phase in order["phases"]]
    return peaks, order["to_device_bytes"]["max"], order["to_host_bytes"]["max"]
