"""Measure the start of a worker by parts, and model that of 256 workers. Run by hand:

    python tests/benchmarks/start.py

    worker    one process that imports what a training worker imports: CPU seconds, files opened and looked for (both
              scale on a file system that nodes share)
    model     workers on nodes of 16: seconds of each import, and of the whole run's calls to a shared file system

Prints JSON and always exits with 0. Wall seconds would be those of a shared machine: CPU seconds are compared.
"""

from __future__ import annotations

import json
import os
import sys

from report import run_python

NODES, DIES = 16, 16
ENV = {
    "VERL_PATCHES": "line=pypi,platform=cpu",
    "OMP_NUM_THREADS": "1",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_USE_V1": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_OFFLINE": "1",
}
PARTS = {
    "ray": "ray",
    "prelude": "verl_patches.prelude_patch",
    "torch": "torch",
    "verl": "verl",
    "verl's Megatron worker": "verl.workers.megatron_workers",
    "vllm": "vllm",
    "verl's rollout": "verl.workers.rollout.vllm_rollout verl.workers.sharding_manager.megatron_vllm",
}
# Runs in the measured process: counts the audit event "open", and the importer's stat calls.
COUNT = """
import importlib._bootstrap_external as external, json, sys, time
opened, looked, found = [0], [0], {}
def heard(event, arguments):
    if event in ("open", "os.listdir", "os.scandir"): opened[0] += 1
sys.addaudithook(heard)
stat = external._path_stat
def counted(path):
    looked[0] += 1
    return stat(path)
external._path_stat = counted
before = (0.0, 0, 0)
def part(name):
    global before
    now = (time.process_time(), opened[0], looked[0])
    keys = ("cpu_s", "opens", "lookups")
    found[name] = {key: round(b - a, 3) for key, a, b in zip(keys, before, now)}
    before = now
part("interpreter")
"""
PROVE = """
from verl_patches.patching import engine
engine.current_engine().intent(), engine.current_engine().digest(), engine.current_engine().status()
part("proof of patches")
print(json.dumps(found))
"""


def worker() -> dict:
    """Return {parts, total} of one worker's imports."""
    imports = [f"import {', '.join(names.split())}\npart({name!r})" for name, names in PARTS.items()]
    for _ in range(2):  # the second time bytecode and page cache exist, as after a first start
        output = run_python("-W", "ignore", "-c", COUNT + "\n".join(imports) + PROVE, **ENV)
    parts = json.loads(output.splitlines()[-1])
    total = {key: round(sum(found[key] for found in parts.values()), 3) for key in parts["ray"]}
    return {"parts": parts, "total": total}


def model(total: dict) -> dict:
    """Return the costs of NODES x DIES workers, from those of one worker."""
    workers = NODES * DIES
    calls = workers * (total["opens"] + total["lookups"])
    return {
        "workers": workers,
        "imports, s a node of 320 cores, each worker on a core of its own": round(total["cpu_s"], 1),
        "s at 50,000 metadata calls a second of a shared file system": round(calls / 50_000, 1),
    }


def main() -> int:
    """Measure and print the report."""
    found = worker()
    answer = {"worker": found, "model": model(found["total"]), "python": sys.version.split()[0]}
    print(json.dumps({**answer, "cpus": os.cpu_count()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
