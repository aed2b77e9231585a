"""Print what commands say: sentences, tables, a Report, and the plan of a run, for people or as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_patches.patching.report import NOT_RUN, Report
from verl_patches.spec import RunSpec
from verl_patches.values import printable, size_text

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
PIPE_COLUMNS, SCREEN_COLUMNS = 120, 110  # width of tables in pipes and files, and of a plan
_NO_WRAP_CELLS = 40  # widest first column that is not wrapped
_SHOWN_FAULTS, _LABEL = 5, 13  # failed checks on a screen; columns of a label
_SIDES = "train", "rollout"
_SCREEN_CHECKS = ("memory", "host memory", "KV cache", "disk rate")
SHOWN_ITEMS = 8  # items of a list in a table, unless they are names


def print_json(data: Any) -> None:
    """Print `data` as JSON, indented."""
    typer.echo(json.dumps(data, indent=1))


def exit_with_report(report: Report, as_json: bool, fine: bool = True) -> NoReturn:
    """Print a report, as JSON or as a table (`fine`: its fine findings too), and exit with its code."""
    if as_json:
        print_json(report.as_dict())
    else:
        print_report(report, fine)
    raise typer.Exit(report.exit_code)


def print_report(report: Report, fine: bool = True) -> None:
    """Print a table of findings, the details of those that need attention, and one line of counts."""
    title = f"{report.command}, line {report.line}"
    shown = [finding for finding in report.findings if fine or finding.state != "fine"]
    if shown:
        rows: dict[Any, tuple[str, ...]] = {}
        for f in shown:
            place = " ".join(filter(None, (f.found, f.where and f"[{f.where}]")))
            alike = (place, f.todo) if f.state == NOT_RUN else id(f)  # checks that wait for the same thing are one row
            same = rows.get(alike)
            row = (f.state, f.name, f.expected, place, f.todo)
            rows[alike] = row if same is None else (f.state, f"{same[1]}, {f.name}", "", place, f.todo)
        red = [number for number, row in enumerate(rows.values()) if row[0] == "problem"]
        print_table(title, ("", "name", "expected", "found", "what to do"), rows.values(), red)
    for finding in shown:
        for detail in finding.details:
            print_text(f"{finding.name}: {detail}")
    counts = ", ".join(f"{count} {state}" for state, count in report.as_dict()["counts"].items())
    print_text(f"{title}: {counts}")


def console(err: bool = False) -> Console:
    """Return the terminal; a pipe or file has PIPE_COLUMNS columns, or COLUMNS where it is exported."""
    out = Console(stderr=err, highlight=False)
    if not out.is_terminal and "COLUMNS" not in os.environ:
        out.width = PIPE_COLUMNS
    return out


def print_text(text: str, style: str = "", err: bool = False, whole: bool = False) -> None:
    """Print a text: unchanged in a pipe, in a terminal wrapped between words unless it must stay `whole` to paste.

    Markup is not read, and control characters except newlines are escaped.
    """
    out = console(err)
    out.print(Text(printable(text, keep="\n"), style), soft_wrap=whole or not out.is_terminal)


def print_command(command: str, columns: int = PIPE_COLUMNS) -> None:
    """Print a shell command, indented, in lines of at most `columns` that end with a backslash; no word is broken."""
    width, lines = min(console().width, columns), [" "]
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""", command):
        if len(lines[-1]) + len(word) + 3 > width and lines[-1].strip():
            lines.append("   ")
        lines[-1] += f" {word}"
    print_text(" \\\n".join(lines), whole=True)


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str]], red: Collection[int] = ()) -> Table:
    """Return a table that rich fits to the console; `red`: row numbers. A short first column is not wrapped."""
    cells = [[Text(printable(cell, keep="\n")) for cell in row] for row in rows]
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=any(columns), header_style="bold")
    for number, column in enumerate(columns):
        whole = number == 0 and all(row[0].cell_len <= _NO_WRAP_CELLS for row in cells)
        grid.add_column(Text(column), no_wrap=whole, overflow="fold")
    for number, row in enumerate(cells):
        grid.add_row(*row, style="red" if number in red else "")
    return grid


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], red: Collection[int] = ()) -> None:
    """Print a title and a `make_table`, without blanks at the ends of lines."""
    print_text(title, "bold")
    out = console()
    with out.capture() as shown:
        out.print(make_table(columns, rows, red))
    typer.echo(re.sub(r" +$", "", shown.get(), flags=re.MULTILINE), nl=False)


@contextlib.contextmanager
def progress_bar(what: str, total: int | None, unit: str = "B") -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr, updated twice a second on a terminal and every 30 s in a file."""
    from tqdm import tqdm

    interval = 0.5 if sys.stderr.isatty() else 30.0
    with tqdm(total=total, desc=what, unit=unit, unit_scale=True, mininterval=interval, delay=interval) as bar:
        yield bar.update


def print_screen(plan: Mapping[str, Any], run: RunSpec | None) -> None:
    """Print a plan in at most 40 lines of SCREEN_COLUMNS and the next command; `run` is None where it has no layout."""
    columns = min(SCREEN_COLUMNS, console().width)
    title = plan["config"]
    if run is not None:
        nodes = f"{run.world_size} ranks on {run.verl.trainer.nnodes} node(s)"
        title += f": {nodes}; line {run.line}, platform {run.platform}, level {run.recipe.level}"
    print_text(title, "bold")
    print_text(textwrap.fill(plan["verdict"], columns), "bold green" if plan["ok"] else "bold red")
    for label, text, lines in _screen_rows(plan):
        wrapper = textwrap.TextWrapper(columns, subsequent_indent=" " * _LABEL, break_on_hyphens=False)
        wrapper.max_lines, wrapper.placeholder = lines, " ... (--all)"
        print_text(wrapper.fill(f"{label:<{_LABEL}}{text}"), "red" if label == "FAILED" else "")
    for way in plan["next"][:1]:
        print_text(f"next (1 of {len(plan['next'])}), {way['what']}:", "bold")
        print_command(way["command"], columns)
    print_text("--all prints every check, rank, row, variable and command; --json all of it as data")


def _screen_rows(plan: Mapping[str, Any]) -> Iterator[tuple[str, str, int]]:
    """Yield (label, text, most lines) of what fails, layouts, memory, seconds, the other level and disks."""
    checks, step = plan["checks"], plan["step"]
    failed = [check for check in checks if not check["ok"]]
    for check in failed[:_SHOWN_FAULTS]:
        yield (
            "FAILED",
            f"{check['name']}: {check['detail'].removeprefix(check['name'] + ': ')}",
            max(2, 10 // len(failed)),
        )
    if len(failed) > _SHOWN_FAULTS:
        yield "FAILED", f"{len(failed) - _SHOWN_FAULTS} more checks (--all)", 1
    for side in _SIDES:
        if plan[side]:
            yield side, plan[side]["layout"], 1
    for check in checks:
        if check["ok"] and (check["name"] in _SCREEN_CHECKS or check["detail"].startswith("a start is refused")):
            yield check["name"], check["detail"], 3 if check["name"] in _SCREEN_CHECKS else 4
    if step:
        text = _seconds_text(step["total_range_s"], step["total_s"], step.get("quoted_total_s"))
        yield "step", f"{text}; ranges: the model's errors on the published runs", 1
        for each in step["phases"] if plan["ok"] else ():
            if each["seconds"]:
                yield each["phase"], _seconds_text(each["range_s"], each["seconds"], each.get("quoted_s")), 1
    if plan["level"] and plan["ok"]:
        yield "level", _level_text(plan["level"]), 2
    notes = [check["name"] for check in checks if check["note"] and check["name"] not in _SCREEN_CHECKS]
    if notes:
        yield "notes on", f"{', '.join(dict.fromkeys(notes))} (--all)", 1


def _seconds_text(bounds: Sequence[float], seconds: float, quoted: float | None) -> str:
    beside = "" if quoted is None else f", {quoted:.1f} by quoted constants"
    return f"{bounds[0]:7.1f} to {bounds[1]:7.1f} s (modelled {seconds:.1f}{beside})"


def _level_text(level: Mapping[str, Any]) -> str:
    """Return the seconds of a step at another level, and what differs there."""
    shown = (key for key in level["keys"] if not key.startswith("critic."))  # those of the actor
    text, keys = level["other"], dict.fromkeys(".".join(key.split(".")[-2:]) for key in shown)
    if level["saves_s"] is not None:
        low, high = level["range_s"]
        change = f"{abs(level['saves_s']):.0f} s {'more' if level['saves_s'] > 0 else 'less'}"
        text += f": {low:.0f} to {high:.0f} s (modelled {level['total_s']:.0f}), {change}"
    return f"{text}; {len(level['rows'])} rows and {len(level['keys'])} keys differ: {', '.join(keys) or 'none'}"


def print_whole_plan(plan: dict[str, Any], run: RunSpec) -> None:
    """Print all of a plan (plan/plan.py) but its screen, under the names of --json."""
    shown = {key: value for key, value in plan.items() if key not in ("config", "ok", "verdict", "next", "commands")}
    shown["patches"] = [row for row in plan["patches"] if row["on"]]
    shown["environment"] = environment = []
    for each in plan["environment"]:
        environment.append({**each, "value": re.sub(r"rows=\S+", "rows=(the ids above)", each["value"])})
    print_data(shown, "plan")
    if not plan["step"] and run.recipe.hardware != "a3":
        print_text(f"step time is not modelled: no published run reports it for {run.hardware.title}", "bold")
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


def print_data(data: Mapping[str, Any], title: str) -> None:
    """Print plain data as tables under its names: one of single values, then one of each list of rows and mapping."""
    single = [(key, _value_text(value, f"{title}.{key}")) for key, value in data.items() if not _is_nested(value)]
    if single:
        print_table(title, ("", ""), single)
    for key, value in data.items():
        name = f"{title}.{key}"
        if not _is_nested(value):
            continue
        if isinstance(value, Mapping):
            print_data(value, name)
        elif any(map(_is_nested, value[0].values())):
            for number, each in enumerate(value, 1):
                print_data(each, f"{name} {number}")
        else:
            rows = [[_value_text(row.get(column), f"{name}.{column}") for column in value[0]] for row in value]
            print_table(name, [*value[0]], rows)


def _is_nested(value: Any) -> bool:
    """Return whether a value needs a table of its own: rows, or a mapping that has more than single values."""
    if isinstance(value, Mapping):
        return any(isinstance(each, Mapping) or _is_nested(each) for each in value.values())
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _value_text(value: Any, key: str) -> str:
    """Return a value of plain data as text; its key says whether it is a size in bytes."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value_text(each, f'{key}.{name}')}" for name, each in value.items())
    if isinstance(value, list | tuple):
        items = [
            f"[{_value_text(each, key)}]" if isinstance(each, list | tuple) else _value_text(each, key)
            for each in value
        ]
        whole = len(items) <= SHOWN_ITEMS or isinstance(value[0], str)
        return ", ".join(items if whole else [*items[:SHOWN_ITEMS], f"... ({len(items)})"])
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "-" if value is None else str(value)
    if "bytes" in key and value >= 1e6:
        return size_text(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
