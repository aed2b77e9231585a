"""Start the smoke command for tests, read a finished run, and share assertions about runs."""

import contextlib
import ipaddress
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from verl_patches.processes import process_name
from verl_patches.weights.run_folders import checkpoint_chain, list_starts, read_start, start_chain

ROOT = Path(__file__).resolve().parents[2]
ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
OFFLOAD = (*(f"{ACTOR}.{group}_offload=true" for group in ("param", "grad", "optimizer")), f"{REF}.param_offload=true")
VERIFY = "recipe.reshard.verify=every"
ARRIVAL_ORDER = "trainer.balance_batch=false"
PPO = ("--steps", "2", "algo=ppo", "trainer.save_freq=1")
BUCKET_BYTES = 16384  # small, so that a weight sync has several buckets
TP2EP2 = ("layout=tp2ep2", "rollout=tp2", "--steps", "2")
TP2EP2 += (VERIFY, *OFFLOAD, f"recipe.reshard.bucket_bytes={BUCKET_BYTES}")
STREAMS = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


@dataclass(frozen=True)
class Finished:
    """Hold a finished run: exit code, output, folder and summary of its newest start, and `look` of a cold one."""

    code: int
    output: str
    folder: Path
    summary: dict
    listeners: dict = field(default_factory=dict)
    folders: dict = field(default_factory=dict)

    @property
    def steps(self):
        """Return the steps of this start and of all starts that it continues."""
        records = [(json.loads((link.folder / "summary.json").read_text()), link) for link in self.chain]
        return [step for record, link in records for step in record["steps"] if link.holds(step["step"])]

    @property
    def chain(self):
        return start_chain(read_start(self.folder))

    @property
    def log(self):
        return (self.folder / "driver.log").read_text(errors="replace")

    @property
    def progress(self):
        return (self.folder / "progress.log").read_text()

    @classmethod
    def read(cls, folder):
        """Read the run in folder/r; folder/finished.json has its code and output."""
        starts = list_starts(folder / "r")
        newest = starts[-1].folder if starts else folder / "r" / "0001"  # no start if it was refused
        summary = json.loads((newest / "summary.json").read_text()) if (newest / "summary.json").is_file() else {}
        return cls(**json.loads((folder / "finished.json").read_text()), folder=newest, summary=summary)


def add_listeners(process, listeners, folders):
    """Add the sockets of a process and its descendants that listen: {"ADDRESS PORT": name of the process}.

    folders: {path: (mode, user)} of each folder on the way from the run's temporary folder to its Ray's sockets.
    """
    for each in [process, *process.children(recursive=True)]:
        with contextlib.suppress(psutil.Error, OSError):
            for found in each.net_connections("inet"):
                if found.status == psutil.CONN_LISTEN:
                    listeners[f"{found.laddr.ip} {found.laddr.port}"] = process_name(each)
            for found in each.net_connections("unix") if each.name() == "raylet" else ():
                if found.laddr.endswith("/sockets/raylet"):
                    for path in Path(found.laddr).parents[:4]:
                        folders[str(path)] = (oct(path.stat().st_mode & 0o777), path.stat().st_uid)


def exposed_listeners(listeners):
    """Return the listeners of look() that other machines can reach."""
    places = {place: ipaddress.ip_address(place.split()[0]) for place in listeners}
    return {k: listeners[k] for k, ip in places.items() if not (getattr(ip, "ipv4_mapped", None) or ip).is_loopback}


def assert_nobody_else_can_reach(run):
    """Assert that a cold run listens on the loopback only, as SECURITY.md says."""
    names = {name.rpartition(":")[2] for name in run.listeners.values()}
    assert {"gcs_server", "raylet", "agent", "WorkerDict", "driver"} <= names, names
    assert exposed_listeners(run.listeners) == {}
    temp, *below = sorted(run.folders)
    assert len(below) == 3 and run.folders[temp] == ["0o700", os.getuid()], run.folders


def smoke_command(*arguments, folder):
    """Return (command, environment) of a smoke run that writes to folder/r; its workers can import the hooks here."""
    command = [sys.executable, "-m", "verl_patches", "smoke", "--run", "r", *arguments, f"recipe.output_root={folder}"]
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    return command, {**os.environ, "COLUMNS": "200", "PYTHONPATH": path}


def hook(name):
    """Return the override for a worker set-up hook of loop_hooks.py."""
    return f"recipe.worker_process_setup_hook=loop_hooks.{name}"


def assert_weights_arrive(run, limit=1e-5, verified=False, syncs=1):
    """Assert that vLLM's log-probs match the actor's in each step, which has `syncs` weight syncs.

    limit: bound of the mean |dlogp|; in fp32, of the largest. verified: each sync must also have compared the weights.
    """
    which = "max" if run.summary["dtype"] == "fp32" else "mean"
    assert run.summary["exit"] == "ok" and all(s["logprob_delta"][which] < limit for s in run.steps)
    assert all(s["grad_norm"] > 0 and s["sync"]["syncs"] == syncs for s in run.steps)
    assert not verified or all(s["sync"]["verified"] for s in run.steps)


def assert_caught(run, step):
    """Assert that the log-prob check ended the run at this step."""
    assert run.code == 1, run.output[-1500:]
    assert "WeightSyncError" in run.summary["exit"] and f"step {step}:" in run.summary["exit"], run.summary["exit"]
    assert run.steps[-1]["step"] == step and run.steps[-1]["logprob_delta"]["mean"] > 1e-3


def resume_overrides(run, step):
    """Return overrides that resume from a run's checkpoint of that step."""
    saved = checkpoint_chain(read_start(run.folder)).checkpoints()[step]
    return "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}"


# Arguments of a run of two steps that is killed once.
KILLED = (hook("killed_in_update"), "recipe.restart.max_restarts=1", "trainer.resume_mode=auto")


def assert_goes_on(killed, whole, *names):
    """Assert that a KILLED run restarted once, after step 1, with metrics bit-equal to those of the whole run."""
    (restart,) = killed.summary["restarts"]
    died = r"died in step 2|ended \d+ s ago .*by a signal"  # seen by a call of the trainer, or by the watch
    assert re.search(died, restart["reason"], re.S) and killed.summary["exit"] == "ok", killed.summary
    assert [step.get("resumed_after") for step in killed.steps] == [None, 1]
    assert read_metrics(killed, *names) == read_metrics(whole, *names)
    assert all(value is not None for values in read_metrics(killed, *names) for value in values)


def read_metrics(run, *names):
    """Return the metrics of these names for each step."""
    return [[step[name] for name in names] for step in run.steps]
