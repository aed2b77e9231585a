"""How commands print: tables, a Report, and the plan of a run, for people or as JSON."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from verl_patches.boot.install_prelude import PLACES
from verl_patches.patching.report import NOT_RUN, Report
from verl_patches.planning.serving import serving_text
from verl_patches.spec import RunSpec
from verl_patches.values import printable

Json = Annotated[bool, typer.Option("--json", help="Plain JSON on standard output.")]
_WIDTH = 200  # columns of what is no table in pipes and files
_TOO_MUCH = " TOO MUCH"
_GAP, _WORD = 2, 30  # blanks between columns; a longer word may be broken, but not in a first column
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
    title = f"{report.command}, {report.about}"
    shown = [finding for finding in report.findings if fine or finding.state != "fine"]
    if shown:
        rows: dict[Any, tuple[str, ...]] = {}
        for f in shown:
            place = " ".join(filter(None, (f.found, f.where and f"[{f.where}]")))
            alike = (place, f.todo) if f.state == NOT_RUN else id(f)  # checks that wait for the same are one row
            same = rows.get(alike)
            row = (f.state, f.name, f.expected, place, f.todo)
            rows[alike] = row if same is None else (f.state, f"{same[1]}, {f.name}", "", place, f.todo)
        red = {number for number, row in enumerate(rows.values()) if row[0] == "problem"}
        table(title, ("", "name", "expected", "found", "what to do"), rows.values(), red)
    for finding in shown:
        for detail in finding.details:
            say(f"{finding.name}: {detail}")
    counts = ", ".join(f"{count} {state}" for state, count in report.as_dict()["counts"].items())
    say(f"{title}: {counts}")


def width() -> int | None:
    """Columns of the terminal, or COLUMNS where it is exported; None in pipes and files, where no line is wrapped."""
    out = Console()
    return out.width if out.is_terminal or "COLUMNS" in os.environ else None


def say(text: str | Text, style: str = "", err: bool = False) -> None:
    """Print text, wrapped between words where there is a width; never padded, no markup."""
    out = Console(stderr=err)
    for line in _wrapped(text if isinstance(text, Text) else Text(printable(text, keep="\n"), style), width()):
        out.print(line, highlight=False, soft_wrap=True)


def say_command(prefix: str, command: str, err: bool = False) -> None:
    """Print `prefix` and a command of a shell: on one line, or where it is too wide in lines that end with a backslash.

    A word of the command is never broken, so that it can be pasted.
    """
    columns = width()
    if columns is None or len(prefix) + 1 + len(command) <= columns:
        say(f"{prefix} {command}", err=err)
        return
    if prefix.strip():
        say(prefix, err=err)
    lines = [" "]
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""", command):
        if len(lines[-1]) + len(word) + 3 > columns and lines[-1].strip():
            lines[-1] += " \\"
            lines.append("   ")
        lines[-1] += f" {word}"
    for line in lines:
        Console(stderr=err).print(Text(line), highlight=False, soft_wrap=True)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], red: Iterable[int] = ()) -> None:
    """Print a table that fits the terminal (`table_lines`); `red`: row numbers."""
    say(title, "bold")
    for line in table_lines(columns, rows, red):
        Console().print(line, highlight=False, soft_wrap=True)


def table_lines(columns: Sequence[str], rows: Iterable[Sequence[str]], red: Iterable[int] = ()) -> list[Text]:
    """The lines of a table: as wide as its cells in pipes and files, else at most as wide as the terminal.

    Cells wrap between words. Where words would have to be broken, each row is a block: its first cell, and below it
    the others with their column's name.
    """
    head = [[printable(column) for column in columns]] if any(columns) else []
    cells = [*head, *([printable(cell, keep="\n") for cell in row] for row in rows)]
    red = {number + len(head) for number in red}
    styles = ["red" if number in red else "bold" if number < len(head) else "" for number in range(len(cells))]
    sizes, whole = [max(map(_longest, column)) for column in zip(*cells, strict=True)], width()
    room = whole and whole - _GAP * (len(sizes) - 1)
    if room and sum(sizes) > room:
        words = [max(map(_longest_word, column)) for column in zip(*cells, strict=True)]
        least = [words[0], *(min(word, _WORD) for word in words[1:])]
        if sum(least) > room:
            blocks = (_block(columns, row, style, whole) for row, style in zip(cells, styles, strict=True))
            return list(itertools.chain(*blocks))
        most = [max(map(_longest, column[len(head) :]), default=0) for column in zip(*cells, strict=True)]
        for level in range(room):
            wider = [max(few, min(many, level)) for many, few in zip(most, least, strict=True)]
            if sum(wider) > room:
                break
            sizes = wider
    return list(itertools.chain(*(_row(row, sizes, style) for row, style in zip(cells, styles, strict=True))))


def _longest(cell: str) -> int:
    return max(map(cell_len, cell.split("\n")))


def _longest_word(cell: str) -> int:
    return max(map(cell_len, cell.split()), default=0)


def _row(cells: Sequence[str], widths: Sequence[int], style: str) -> list[Text]:
    columns = [_wrapped(Text(cell), size) for cell, size in zip(cells, widths, strict=True)]
    lines = []
    for parts in itertools.zip_longest(*columns, fillvalue=Text()):
        line = "".join(
            part.plain + " " * (size + _GAP - part.cell_len) for part, size in zip(parts, widths, strict=True)
        )
        lines.append(Text(line.rstrip(), style))
    return lines


def _block(columns: Sequence[str], cells: Sequence[str], style: str, size: int) -> list[Text]:
    if list(cells) == list(columns):
        return []
    named = [f"{name}: {cell}" if name else cell for name, cell in zip(columns, cells, strict=True)][1:]
    text = "; ".join(text for text, cell in zip(named, cells[1:], strict=True) if cell)
    below = [Text("  ", style) + line for line in _wrapped(Text(text, style), size - 2)]
    return [*_wrapped(Text(cells[0], style), size), *below]


def _wrapped(text: Text, size: int | None) -> list[Text]:
    """Lines of at most `size` cells, without blanks at their end."""
    lines = text.split("\n", allow_blank=True) if size is None else text.wrap(Console(), max(1, size), overflow="fold")
    for line in lines:
        line.rstrip()
    return list(lines)


def console() -> Console:
    """The terminal, or a wide console in pipes and files."""
    return Console(width=width() or _WIDTH)


@contextlib.contextmanager
def progress_bar(what: str, total: int | None, unit: str = "B", every: int = 0) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr: on a terminal twice a second, in a file every 30 s, or at `every` so many units."""
    from tqdm import tqdm

    interval = 0.5 if sys.stderr.isatty() else 30.0
    often = {"mininterval": interval, "delay": interval}
    if every and not sys.stderr.isatty():
        often = {"mininterval": 0, "miniters": every, "maxinterval": float("inf")}
    with tqdm(total=total, desc=what, unit=unit, unit_scale=True, **often) as bar:
        yield bar.update


# the plan of a run (planning/plan.py)


def show_plan(plan: dict[str, Any], run: RunSpec) -> None:
    """Print a plan as tables; of one that failed only the phases that do not fit, as its checks are printed below."""
    trainer = run.verl.trainer
    say(
        f"{plan['config']}: {run.world_size} ranks on {trainer.nnodes} node(s) x {trainer.n_gpus_per_node}; "
        f"line {run.line}, platform {run.platform}",
        "bold",
    )
    if not plan["ok"]:
        if plan["memory"]:
            title, columns, rows = memory_rows(plan["memory"])
            if short := [row for row in rows if _TOO_MUCH in row[1]]:
                table(title, columns, short)
        return
    table("checks", ("check", "", "detail"), [(c["name"], _state(c), c["detail"]) for c in plan["checks"]])
    for side in ("train", "rollout"):
        table(f"{side}: {plan[side]['layout']}", ("", "ranks"), _side_rows(plan[side]))
    table(*memory_rows(plan["memory"]))
    table(*other_memory_rows(plan["memory"]))
    if plan["inference"]:
        say(f"generate, chat, eval: {serving_text(plan['inference'])}", "bold")
    if plan["step"]:
        table(*step_rows(plan["step"]))
        table(*start_rows(plan["start"]))
        table(*calibration_rows(plan["step"]["calibration"]))
    elif run.recipe.hardware != "a3":
        say(f"no seconds of a step: no published run has them for {run.hardware.title}", "bold")
    _show_start(plan)


def _show_start(plan: dict[str, Any]) -> None:
    """Traffic and ports, patches, environment, and the commands of each node."""
    if plan["traffic"]:
        table("traffic (modelled) and ports", ("", ""), _traffic_rows(plan))
    on = [(row["id"], row["kind"], row["target"], row["reason"]) for row in plan["patches"] if row["on"]]
    table(f"patches: {len(on)} of {len(plan['patches'])} rows on", ("id", "kind", "target", "why on"), on)
    values = {v["name"]: re.sub(r"rows=\S+", "rows=(the ids above)", v["value"]) for v in plan["environment"]}
    rows = [(v["name"], values[v["name"]], _SET_IN[v["where"]], v["reason"], v["read_by"]) for v in plan["environment"]]
    table("environment", ("name", "value", "set in", "reason", "read by"), rows)
    say(PLACES)
    refused = [c["name"] for c in plan["checks"] if c["detail"].startswith("a start is refused")]
    title = "commands to type, in this order:"
    if refused:
        title = f"commands, once the checks above that refuse a start hold ({', '.join(refused)}):"
    say(title, "bold")
    if any("HEAD" in command["command"] for command in plan["commands"]):
        say(
            "HEAD and NODE stand for addresses of your nodes that the other nodes reach, not 127.0.0.1. Each "
            "node needs the folders of PYTHONPATH and the model's; vllm, vllm-ascend and torch_npu are those "
            "installed there"
        )
    for command in plan["commands"]:
        say(f"{command['where']}:", "bold")
        say_command(" ", command["command"])


def _state(check: dict[str, Any]) -> str:
    return "note" if check["note"] else "ok"


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
        return text(size_bytes) + (_TOO_MUCH if hbm is not None and size_bytes > hbm else "")

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
    limit = "not compared: what a node has is not known"
    if host["limit_bytes"] is not None:
        limit = f"a node has {host['limit_bytes'] / 1e9:.2f}"
        limit += _TOO_MUCH if host["node_bytes"] > host["limit_bytes"] else ""
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
    host = f"host work of a decode step x {assumed['engine_ratio']}"
    phases = [(phase["phase"], f"{phase['seconds']:.2f}") for phase in step["phases"] if phase["seconds"]]
    speed = f"{step['total_s']:.2f}, {step['tokens_per_s_per_die']:.1f} tokens/s of each die"
    said = f"{tokens} ({assumed['lengths']}), DP syncs over {assumed['dp_sync']}, {host}"
    load = "busiest rank {train:.2f} x the mean in training, {rollout:.2f} in rollout".format(**assumed["expert_load"])
    rows = [*phases, ("total", speed), *_tail_rows(step["tail"]), ("assumed", said), ("tokens of experts", load)]
    apart = f"{assumed['not_counted_s']:.1f} s of rollout less: collector at rest, cores bound (quoted, another model)"
    rows += [("not counted", apart)] if assumed["not_counted_s"] else []
    rows += [("bounds of the watch", step["watch"])] if "watch" in step else []
    return "step (modelled, not measured)", ("phase", "seconds"), rows


def _tail_rows(tail: dict[str, Any] | None) -> Iterator[tuple[str, str]]:
    if tail is not None:
        of = "{off_s:.2f} s, with recipe.rollout.rebalance_every={rebalance_every} {on_s:.2f} s".format(**tail)
        yield "rollout without rebalance", of
        if tail["graph_sizes"]:
            yield "fastest graph_batch_sizes", "{graph_sizes}: {graphs_s:.2f} s of rollout".format(**tail)


def start_rows(start: dict[str, Any]) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]]:
    """(title, columns, rows) of a table: seconds from the launch to the end of step 1."""
    total = {**start, "phase": "all", "part": "", "of": "launch to the end of step 1"}
    rows = [tuple(map(str, row.values())) for row in start["phases"]]
    rows.append(tuple(str(total[column]) for column in start["phases"][0]))
    title = "start (modelled, not measured): page cache cold, warm; summary.json of a run has `start` by these phases"
    return title, ("phase", "part", "cold s", "warm s", "of"), rows


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
