"""The command `data build`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from verl_patches.cli.output import Json, print_json, say
from verl_patches.data.build import build
from verl_patches.data.settings import REASONS, read_settings

app = typer.Typer(no_args_is_help=True, help="Make data that runs read.")


@app.callback()
def _group() -> None:
    """Make data that runs read."""


@app.command("build")
def build_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Keys: docs/data.md.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="In place of its.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an output that is there.")] = False,
    as_json: Json = False,
) -> None:
    """Make train.parquet and test.parquet, in verl's columns, of files, folders, HF datasets or s3:// and hf://."""
    settings = read_settings(file, overrides or ())
    code, report = build(settings, overwrite, quiet=as_json)
    if as_json:
        print_json({"exit": code, **report})
    else:
        _show(report, settings.output_prefix)
    raise typer.Exit(code)


def _show(report: dict[str, Any], output: str) -> None:
    for reason in REASONS:
        found, what = report[reason], reason.replace("_", " ")
        for line in found["shown"]:
            say(f"{what}: {line}", err=True)
        if more := found["rows"] - len(found["shown"]):
            say(f"{what}: {more} more", err=True)
    counts = ", ".join(f"{report[reason]['rows']} {reason.replace('_', ' ')}" for reason in REASONS)
    say(f"{report['read']} rows read: {counts}")
    if report["refused"]:
        say(f"nothing written: too many rows are {' and '.join(report['refused'])} (refuse_above)", err=True)
        return
    say(f"{output}: {report['train']} train rows, {report['test']} test rows")
    if tokens := report.get("longest_tokens"):
        keys = " ".join(f"data.max_{part}_length={count}" for part, count in tokens.items() if count)
        say(f"longest, in tokens, as keys of a run: {keys}")
