"""Print what commands say: sentences, tables, a Report, for people or as JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from verl_patches.patching.report import NOT_RUN, Report
from verl_patches.values import printable

Json = Annotated[bool, typer.Option("--json", help="Print JSON on standard output.")]
PIPE_COLUMNS = 110  # width of tables in pipes and files
_NO_WRAP_CELLS = 40  # widest first column that is not wrapped


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


def print_command(command: str) -> None:
    """Print a shell command, indented, in lines that end with a backslash; no word is broken."""
    out, lines = console(), [" "]
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""", command):
        if len(lines[-1]) + len(word) + 3 > out.width and lines[-1].strip():
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
