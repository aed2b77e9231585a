"""What a run does now, from the files of its folder alone: `status RUN`, from any terminal that sees them.

`state` is one of
    starting   no step's work has begun, and the launcher is there
    running    a step is in progress
    ended      all steps were made
    ending     a try ended with the reason in `exit`; its launcher ends processes, or starts the next try
    failed     the run ended with that reason
    lost       the record says running, but no launcher holds the folder's lock: it was killed, or it runs on another
               node and the file system does not share locks between nodes
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl_patches.evaluation.record import PROGRESS, SUMMARY, last_lines, read_doing, read_summary
from verl_patches.evaluation.report import median, resumed, timed_steps
from verl_patches.processes import is_locked

LINES = 5  # of progress.log, the last ones
RUNNING = ("starting", "running", "ending")
PLACES = (SUMMARY, PROGRESS, "config.yaml")  # a folder with one of them is a run's
# call of the trainer -> its phases in a step's seconds
PHASES_OF = {
    "generate_sequences": ("reshard", "rollout"),
    "reward": ("reward",),
    "compute_log_prob": ("log_prob",),
    "compute_ref_log_prob": ("ref",),
    "update_actor": ("update",),
}


def live(folder: Path, now: float | None = None) -> dict[str, Any]:
    """Plain data about a run at `now` (seconds since the epoch); None where the run does not have it yet.

    step, steps: the one in progress, or the last one, of how many. resumed: after which steps, as text. phase, phase_s,
    phase_last_s: the call in progress, its seconds so far, and those of the last step. step_s: median
    (evaluation/report.py). eta_s: of the run's end, by that median. reward, grad_norm, logprob_delta, tokens_per_s,
    tflops_per_s, mfu: of the last finished step, rates by rank. quiet_s: since anything was written. Between nodes
    seconds are as exact as their clocks. ConfigError for a damaged file (record.py).
    """
    now = time.time() if now is None else now
    summary, doing = read_summary(folder), read_doing(folder)
    steps, ended = summary.get("steps", []), summary.get("exit", "running")
    last = steps[-1] if steps else {}
    found: dict[str, Any] = {"run": summary.get("run") or folder.name, "folder": str(folder)}
    found |= {"state": _state(folder, ended, doing), "exit": ended}
    found |= {"step": doing.get("step", last.get("step")), "steps": doing.get("steps"), "resumed": resumed(steps)}
    pace = median(step["seconds"].get("step") for step in timed_steps(steps))
    found |= {"phase": None, "phase_s": None, "phase_last_s": None, "step_s": pace, "eta_s": None}
    if found["state"] == "running" and doing:
        before = [last.get("seconds", {}).get(phase) for phase in PHASES_OF.get(doing["call"], ())]
        seconds = sum(filter(None, before)) if any(before) else None
        found |= {"phase": doing["phase"], "phase_s": now - doing["since"], "phase_last_s": seconds}
        if pace is not None:
            left = found["steps"] - found["step"] + 1
            found["eta_s"] = max(left * pace - (now - doing["step_since"]), 0.0)
    found |= {name: last.get(name) for name in ("reward", "grad_norm")}
    rates, delta = last.get("rates") or {}, last.get("logprob_delta") or {}
    found |= {"logprob_delta": delta.get("mean"), "tokens_per_s": rates.get("tokens_per_s")}
    found |= {name: (rates.get(name) or {}).get("step") for name in ("tflops_per_s", "mfu")}
    written = [path.stat().st_mtime for path in map(folder.joinpath, (*PLACES, "driver.log")) if path.exists()]
    return found | {"quiet_s": now - max(written, default=now), "lines": last_lines(folder, LINES)}


def _state(folder: Path, ended: str, doing: Mapping[str, Any]) -> str:
    if ended == "ok":
        return "ended"
    locked = is_locked(folder / ".lock")  # by the launcher; None where none made one
    if ended != "running":
        return "ending" if locked else "failed"
    if locked is False:
        return "lost"
    return "running" if doing else "starting"
