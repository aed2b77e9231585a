"""Read the files that a start writes into its folder: summary.json, now.json, progress.log.

A file that does not exist yet reads as empty; one that is not a JSON object raises a ConfigError with its path.
run/record/curves.py reads metrics.jsonl.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.trainer.record import mean_logprob_delta
from verl_patches.values import printable
from verl_patches.weights.run_folders import read_start, start_chain

SUMMARY_FILE, PROGRESS_FILE = "summary.json", "progress.log"


def read_summary(folder: Path) -> dict[str, Any]:
    """Return summary.json of a start, with the steps of the starts that it resumes before its own."""
    start, own = read_start(folder), _read_own_summary(folder)
    links = start_chain(start) if start else []
    if len(links) < 2:
        return own
    steps: list[dict[str, Any]] = []
    val_before = None
    for link in links:
        part = own if link.folder == folder else _read_own_summary(link.folder)
        val = part.get("val_before")
        if val and steps and steps[-1]["step"] == val["step"]:
            steps[-1]["val"] = val["val"]
        elif val and link.holds(val["step"]):
            val_before = val_before or val
        steps += [step for step in part.get("steps", ()) if link.holds(step["step"])]
    return {**own, "steps": steps, "val_before": val_before, "logprob_delta": mean_logprob_delta(steps)}


def _read_own_summary(folder: Path) -> dict[str, Any]:
    found = read_object(folder / SUMMARY_FILE)
    if reason := found.get("exit"):
        found["exit"] = printable(reason, keep="\n\t")  # it may hold the message of any library
    return found


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file of a run, empty where there is no file; NaN and Infinity become None."""
    try:
        found = json.loads(path.read_bytes(), parse_constant=lambda name: None)
        if isinstance(found, dict):
            return found
        fault: object = f"a {type(found).__name__}"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        fault = error
    raise ConfigError(f"{path}: expected a JSON object as a run writes it, found {fault}; see driver.log beside it")


def last_lines(folder: Path, count: int) -> list[str]:
    """Return the last complete lines of progress.log; empty where it does not exist."""
    try:
        lines = (folder / PROGRESS_FILE).read_text(errors="replace").split("\n")
    except FileNotFoundError:
        return []
    return [printable(line[2:]) for line in lines if line.startswith("| ")][-count:]
