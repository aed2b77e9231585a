"""Define the commands `data build` and `data from-rollouts`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from verl_patches.cli.output import Json, print_command, print_json, print_text, progress_bar
from verl_patches.run.compose import output_root
from verl_patches.tools.data.from_rollouts import Choice, write_rollout_data
from verl_patches.weights.run_folders import find_start

app = typer.Typer(no_args_is_help=True, help="Make data files for runs.")


@app.command("build")
def build_command(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="Keys: see docs/data.md.", show_default=False)],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[key=value ...]", help="New values.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Replaces output_prefix of the file.")] = None,
    as_json: Json = False,
) -> None:
    """Make train.parquet and test.parquet with verl's columns from files, folders, HF datasets, s3:// or hf://."""
    from verl_patches.tools.data.build import build_data
    from verl_patches.tools.data.settings import read_settings

    settings = read_settings(file, overrides or (), output)
    if not sys.stderr.isatty():  # tqdm, which datasets uses, then prints a line every so many records
        os.environ |= {"TQDM_MINITERS": str(settings.log_interval), "TQDM_MININTERVAL": "0", "TQDM_MAXINTERVAL": "inf"}
    code, report = build_data(settings)
    if as_json:
        print_json({"exit": code, **report})
    else:
        _print_build_report(report, settings.output_prefix)
    raise typer.Exit(code)


@app.command("from-rollouts")
def from_rollouts_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that recorded its rollouts.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The folder to write.")],
    kind: Annotated[Literal["best", "conditional", "pairs"], typer.Option("--to", help="Which data.")] = "best",
    best: Annotated[int, typer.Option(min=1, help="With --to best: most responses kept of a prompt.")] = 1,
    threshold: Annotated[float | None, typer.Option(help="Lowest reward of a kept or chosen response.")] = None,
    margin: Annotated[float, typer.Option(min=0, help="With --to pairs: least difference of rewards.")] = 0.0,
    as_json: Json = False,
) -> None:
    """Make SFT data or preference pairs from a run's responses and their rewards."""
    choice, folder = Choice(kind, best, threshold, margin), find_start(run, output_root())
    with progress_bar("steps", None, "step") as advance:
        report = write_rollout_data(folder, output, choice, advance)
    if as_json:
        print_json(report)
        return
    why = "".join(f", {count} {reason}" for reason, count in report["left_out"].items())
    print_text("{rows} rows from {responses} responses to {prompts} prompts in {steps} steps".format(**report) + why)
    print_text("train on it:")
    print_command(report["command"])


def _print_build_report(report: dict[str, Any], output: str) -> None:
    counts = []
    for reason, found in report.items():
        if isinstance(found, dict) and "shown" in found:
            what = reason.replace("_", " ")
            counts.append(f"{found['rows']} {what}")
            for text in found["shown"]:
                print_text(f"{what}: {text}", err=True)
    print_text(f"{report['read']} rows read: {', '.join(counts)}")
    if report["refused"]:
        print_text(f"nothing written: too many rows are {' and '.join(report['refused'])}; see refuse_above", err=True)
        return
    print_text(f"{output}: {report['train']} train rows, {report['test']} test rows")
    if tokens := report.get("longest_tokens"):
        keys = " ".join(f"data.max_{part}_length={count}" for part, count in tokens.items() if count)
        print_text(f"longest lengths in tokens, as overrides of a run: {keys}")
    print_text("an example, " + ("as it is trained" if tokens else "before the run's chat template") + ":")
    for name, value in report["example"].items():
        print_text(f"--- {name} ---\n{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
