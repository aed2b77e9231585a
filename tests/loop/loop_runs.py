"""How tests start the smoke command, what is left of a run, and what several tests assert of it."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
OFFLOAD = (*(f"{ACTOR}.{group}_offload=true" for group in ("param", "grad", "optimizer")), f"{REF}.param_offload=true")
VERIFY = "recipe.reshard.verify=every"
STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


@dataclass(frozen=True)
class Finished:
    """A run that ended: exit code, seconds, its output, its folder and its summary."""

    code: int
    wall_s: float
    output: str
    folder: Path
    summary: dict

    @property
    def steps(self):
        return self.summary["steps"]

    @property
    def log(self):
        return (self.folder / "driver.log").read_text(errors="replace")

    @property
    def progress(self):
        return (self.folder / "progress.log").read_text()

    @classmethod
    def read(cls, folder):
        """The run in folder/r; folder/finished.json has its code, wall_s and output."""
        summary = folder / "r" / "summary.json"
        summary = json.loads(summary.read_text()) if summary.is_file() else {}
        return cls(**json.loads((folder / "finished.json").read_text()), folder=folder / "r", summary=summary)


def smoke_command(*arguments, folder):
    """(command, environment) of one smoke run that writes to folder/r; its workers can import this folder's hooks."""
    command = [sys.executable, "-m", "verl_patches", "smoke", "--run", "r", *arguments, f"recipe.output_root={folder}"]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return command, {**os.environ, "COLUMNS": "200", "PYTHONPATH": path}


def hook(name):
    """The override for a worker set-up hook of loop_hooks.py."""
    return f"recipe.worker_process_setup_hook=loop_hooks.{name}"


def assert_weights_arrive(run, limit=1e-5, verified=False):
    """Every step has vLLM's log-probs of the actor and one weight sync; `verified`: the sync was compared.

    limit: of the mean |dlogp|; in fp32, of the largest.
    """
    which = "max" if run.summary["dtype"] == "fp32" else "mean"
    assert run.summary["exit"] == "ok" and all(s["logprob_delta"][which] < limit for s in run.steps)
    assert all(s["grad_norm"] > 0 and s["sync"]["syncs"] == 1 for s in run.steps)
    assert not verified or all(s["sync"]["verified"] for s in run.steps)


def assert_caught(run, step):
    """The truth check ended the run at this step."""
    assert run.code == 1, run.output[-1500:]
    assert "WeightSyncError" in run.summary["exit"] and f"step {step}:" in run.summary["exit"], run.summary["exit"]
    assert run.steps[-1]["step"] == step and run.steps[-1]["logprob_delta"]["mean"] > 1e-3


def resume(run, step):
    """Overrides that resume from a run's checkpoint of that step."""
    saved = run.folder / "checkpoints" / f"global_step_{step}"
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"


def metrics_of(run, *names):
    """Per step, the metrics of these names."""
    return [[step[name] for name in names] for step in run.steps]
