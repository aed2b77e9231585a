"""`status RUN`: what a run does now, printed once, as JSON, or refreshed until it ends."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from verl_patches.cli.output import console, print_json
from verl_patches.config.compose import output_root
from verl_patches.evaluation.live import PLACES, RUNNING, live
from verl_patches.evaluation.report import find_run
from verl_patches.values import printable

REFRESH_S = 2.0
STYLES = {"failed": "bold red", "lost": "bold red", "ended": "green"}


def show_live(run: Path, watch: bool, as_json: bool) -> NoReturn:
    """Print what a run does now, with `watch` until it ends; exit code 1 where it failed or its launcher is gone."""
    folder = find_run(run, output_root(), PLACES)
    found = live(folder)
    if as_json:
        print_json(found)
    elif watch:
        out = console()
        with Live(view(found), console=out, auto_refresh=False) as shown:
            try:
                while found["state"] in RUNNING:
                    time.sleep(REFRESH_S)
                    found = live(folder)
                    shown.update(view(found), refresh=True)
            except KeyboardInterrupt:
                pass
        if not out.is_terminal:
            out.print()  # there Live ends without a newline
    else:
        console().print(view(found))
    raise typer.Exit(0 if found["state"] in (*RUNNING, "ended") else 1)


def view(found: dict[str, Any]) -> Group:
    """What `evaluation.live.live` found, for a terminal."""
    step, steps = found["step"], found["steps"]
    head = Text(printable(f"{found['run']}: {found['state']}"), style=STYLES.get(found["state"], "bold"))
    made = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _rows(found):
        made.add_row(name, Text(value))  # a str would be read as Rich's markup
    if step and steps:
        done = steps if found["state"] == "ended" else step - 1
        made.add_row("", ProgressBar(total=steps, completed=done, width=60))  # in a row: a bar ends no line
    return Group(head, made, *(Text(line) for line in found["lines"]))


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if found["state"] == "failed":
        rows.append(("reason", found["exit"].partition("\n")[0][:500]))
    if found["state"] == "lost":
        rows.append(("reason", "no launcher holds its lock: killed, or on a node whose locks this file system hides"))
    if found["step"]:
        rows.append(("step", f"{found['step']} of {found['steps'] or 'unknown'}"))
    if found["resumed"]:
        rows.append(("resumed", found["resumed"]))
    if found["phase"]:
        last = "" if found["phase_last_s"] is None else f", {found['phase_last_s']:.1f} s in the last step"
        rows.append(("phase", f"{found['phase']}: {found['phase_s']:.0f} s{last}"))
    texts = {
        "step s": (found["step_s"], "{:.3f}, median"),
        "ends in": (found["eta_s"], "{:.0f} s"),
        "reward": (found["reward"], "{:.4f}"),
        "grad_norm": (found["grad_norm"], "{:.5f}"),
        "|dlogp|": (found["logprob_delta"], "{:.2e}"),
        "tokens/s/rank": (found["tokens_per_s"], "{:.1f}"),
        "TFLOP/s/rank": (found["tflops_per_s"], "{:.4g}"),
        "MFU": (found["mfu"], "{:.3f}"),
        "last output": (found["quiet_s"] if found["state"] != "ended" else None, "{:.0f} s ago"),
    }
    return rows + [(name, form.format(value)) for name, (value, form) in texts.items() if value is not None]
