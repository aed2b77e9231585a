"""How commands print: tables, and the one form of a Report, for people or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Annotated, NoReturn

import typer

from verl_patches.patching.report import Report

Json = Annotated[bool, typer.Option("--json", help="Plain JSON on standard output.")]


def leave_with(report: Report, as_json: bool, fine: bool = True) -> NoReturn:
    """Print a report, as JSON or for people (`fine`: its fine findings too), and leave with its exit code."""
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=1))
    else:
        show(report, fine)
    raise typer.Exit(report.exit_code)


def show(report: Report, fine: bool = True) -> None:
    """A table of findings, the details of what is not fine, and one line of counts."""
    if report.state == "empty":
        typer.echo(f"{report.command}: no row for line {report.line}: nothing was checked")
        return
    title = f"{report.command}, line {report.line}"
    told = [finding for finding in report.findings if fine or finding.state != "fine"]
    if told:
        rows = [(f.state, f.name, f.expected, " ".join(filter(None, (f.found, f.where and f"[{f.where}]"))), f.todo)
                for f in told]
        red = {number for number, finding in enumerate(told) if finding.state == "problem"}
        table(title, ("", "name", "expected", "found", "what to do"), rows, red)
    for finding in told:
        for detail in finding.details:
            typer.echo(f"{finding.name}: {detail}")
    counts = ", ".join(f"{count} {state}" for state, count in report.as_dict()["counts"].items())
    typer.echo(f"{title}: {counts}")


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], red: Iterable[int] = ()) -> None:
    """A table on standard output, 200 columns wide in pipes and files so that ids stay whole; `red`: row numbers."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made, red = Table(title=title), set(red)
    for column in columns:
        made.add_column(column, overflow="fold")
    for number, row in enumerate(rows):
        made.add_row(*[Text(cell, style="red" if number in red else "") for cell in row])
    console = Console()
    (console if console.is_terminal else Console(width=200)).print(made)
