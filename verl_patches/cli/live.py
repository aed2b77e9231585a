"""Show what a run does now (`status RUN`) from the files of its folder, and so from any terminal that sees them.

`state` is one of
    starting   no step's work has begun, and the launcher is alive
    running    a step is in progress
    ended      all steps were made
    ending     this start failed; `exit` says why; its launcher ends processes, or makes the next start
    failed     the run ended with that reason
    interrupted  Ctrl-C, SIGTERM or SIGHUP ended the run
    lost       the record says running, but no launcher holds the folder's lock: it was killed, or it runs on another
               node and the file system does not share locks between nodes
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Group
from rich.text import Text

from verl_patches.cli.output import console, make_table, print_json
from verl_patches.errors import INTERRUPTION_PREFIX
from verl_patches.layout.phases import STEP_PHASES
from verl_patches.patching.switches import recorded_off_ids, switched_off_text
from verl_patches.run.compose import output_root
from verl_patches.run.record.record import PROGRESS_FILE, SUMMARY_FILE, last_lines, read_object, read_summary
from verl_patches.run.record.report import medians, resumed_text, step_value
from verl_patches.shared_files import LOCK, is_locked
from verl_patches.trainer.record import NOW_FILE
from verl_patches.values import printable
from verl_patches.weights.run_folders import find_start, list_starts

SHOWN_LINES = 5  # last lines of progress.log that are shown
LIVE_STATES = ("starting", "running", "ending")
STATE_STYLES = {"failed": "bold red", "lost": "bold red", "ended": "green"}
FIGURES = ("step s", "reward", "grad_norm", "|dlogp|", "tokens/s/rank", "TFLOP/s/rank", "MFU")
LOST_REASON = "no launcher holds the lock of its folder: it was killed, or locks of its node are not visible here"


def print_run_state(run: Path, as_json: bool) -> NoReturn:
    """Print what a run does now; exit code 1 where it failed or its launcher is gone."""
    facts = live_facts(find_start(run, output_root()))
    if as_json:
        print_json(facts)
    else:
        out = console()
        out.print(render_facts(facts), soft_wrap=not out.is_terminal)
    raise typer.Exit(0 if facts["state"] in (*LIVE_STATES, "ended") else 1)


def live_facts(folder: Path, now: float | None = None) -> dict[str, Any]:
    """Return plain data about a run at `now` (seconds since the epoch); values that the run lacks so far are None.

    step, steps: the step in progress, or the last one, and their total. resumed: after which steps, as text. off: rows
    that the user switched off, once the record has rows. phase, phase_s, phase_last_s: the call in progress, its
    seconds so far, and those of the last step. eta_s: until the run's end, by the median of `step s`. figures: {name:
    {last step, median}} as in run/record/report.py. quiet_s: since the last write. Between nodes seconds are as exact
    as their clocks. Raise ConfigError for a damaged file (record.py).
    """
    now = time.time() if now is None else now
    summary, doing = read_summary(folder), read_object(folder / NOW_FILE)
    steps, exit_reason = summary.get("steps", []), summary.get("exit", "running")
    last, middle = steps[-1] if steps else {}, medians(steps, FIGURES)
    facts: dict[str, Any] = {"run": summary.get("run") or folder.parent.name, "folder": str(folder)}
    facts |= {"state": _state(folder, exit_reason, doing), "exit": exit_reason}
    facts |= {"off": recorded_off_ids(summary.get("patches", []))}
    facts |= {"step": doing.get("step", last.get("step")), "steps": doing.get("steps"), "resumed": resumed_text(steps)}
    facts |= {"phase": None, "phase_s": None, "phase_last_s": None, "eta_s": None}
    if facts["state"] == "running" and doing:
        before = [last.get("seconds", {}).get(phase.name) for phase in STEP_PHASES if phase.call == doing["call"]]
        seconds = sum(filter(None, before)) if any(before) else None
        facts |= {"phase": doing["phase"], "phase_s": now - doing["since"], "phase_last_s": seconds}
        if middle["step s"] is not None:
            left = facts["steps"] - facts["step"] + 1
            facts["eta_s"] = max(left * middle["step s"] - (now - doing["step_since"]), 0.0)
    facts["figures"] = {name: {"last step": step_value(last, name), "median": middle.get(name)} for name in FIGURES}
    files = map(folder.joinpath, (SUMMARY_FILE, PROGRESS_FILE, "config.yaml", "driver.log"))
    written = [path.stat().st_mtime for path in files if path.exists()]
    return facts | {"quiet_s": now - max(written, default=now), "lines": last_lines(folder, SHOWN_LINES)}


def _state(folder: Path, exit_reason: str, doing: Mapping[str, Any]) -> str:
    if exit_reason == "ok":
        return "ended"
    home = folder.resolve().parent
    later = [start for start in list_starts(home) if start.name > folder.resolve().name]
    locked = not later and is_locked(home / LOCK)  # by the launcher; None where no launcher made a lock
    if exit_reason != "running" and locked:
        return "ending"
    if exit_reason != "running":
        return "interrupted" if exit_reason.startswith(INTERRUPTION_PREFIX) else "failed"
    if locked is False:
        return "lost"
    return "running" if doing else "starting"


def render_facts(facts: dict[str, Any]) -> Group:
    """Render the facts of `live_facts` for a terminal; each text is a Text, as Rich would read a str as markup."""
    state, step, steps = facts["state"], facts["step"], facts["steps"]
    reason = LOST_REASON if state == "lost" else None
    if state in ("failed", "interrupted"):
        reason = facts["exit"].partition("\n")[0][:500]
    last = "" if facts["phase_last_s"] is None else f", {facts['phase_last_s']:.1f} s in the last step"
    rows = {
        "reason": reason,
        "step": f"{step} of {steps or 'unknown'}" if step else None,
        "resumed": facts["resumed"],
        "phase": f"{facts['phase']}: {facts['phase_s']:.0f} s{last}" if facts["phase"] else None,
        "ends in": None if facts["eta_s"] is None else f"{facts['eta_s']:.0f} s",
        "last output": None if state == "ended" else f"{facts['quiet_s']:.0f} s ago",
    }
    lines = make_table(("", ""), [(name, value) for name, value in rows.items() if value])
    texts = []
    for name, figure in facts["figures"].items():
        values = ["" if value is None else f"{value:.4g}" for value in figure.values()]
        if any(values):
            texts.append((name, *values))
    figures = [make_table(("", "last step", "median"), texts)] if texts else []
    head = Text(printable(f"{facts['run']}: {state}"), style=STATE_STYLES.get(state, "bold"))
    off = [Text(switched_off_text(facts["off"]))] if facts["off"] else []
    return Group(head, *off, lines, *figures, *map(Text, facts["lines"]))
