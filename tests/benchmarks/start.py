"""What the start of a run costs, by part, and a model of 256 workers fitted to it. Run by hand:

    python tests/benchmarks/start.py [--smokes 1] [--actors 4 8 16]

    worker    one process that imports what a training worker imports: CPU seconds, files opened and looked for (both
              scale on a file system that nodes share), and the packages whose modules take longest
    ray       Ray's start with n actors that import the prelude alone: wall seconds, CPU seconds of all processes
    smoke     (--smokes 0: left out) runs of one step with 2 and 4 workers: `start` of their summary.json
    model     n workers on nodes of 16: CPU seconds a node, opens and look-ups of the whole run, and seconds of verl's
              serial part: worker 0 has started before verl makes the others (verl/single_controller/ray/base.py)

Prints JSON and always exits with 0. Workers share two threads here, so CPU seconds are compared, not wall seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import psutil
from report import run_smoke

ROOT = Path(__file__).resolve().parents[2]
NODES, DIES, CORES = 16, 16, 320
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
# in the measured process: counts of the audit event "open", and of the importer's stat calls
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
before = (0.0, 0, 0, 0)
def part(name):
    global before
    now = (time.process_time(), opened[0], looked[0], len(sys.modules))
    keys = ("cpu_s", "opens", "lookups", "modules")
    found[name] = {key: round(b - a, 3) for key, a, b in zip(keys, before, now)}
    before = now
part("interpreter")
"""
PROVE = """
from verl_patches.patching import engine
engine.current().intent(), engine.current().digest(), engine.current().status()
part("proof of patches")
print(json.dumps(found))
"""


def run(code: str, *flags: str) -> subprocess.CompletedProcess:
    """A fresh process with the environment of a CPU run."""
    command = [sys.executable, "-W", "ignore", *flags, "-c", code]
    env = {**os.environ, **ENV, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=ROOT)


def worker() -> dict:
    """{parts, total, slowest packages} of one worker's imports."""
    imports = [f"import {', '.join(names.split())}\npart({name!r})" for name, names in PARTS.items()]
    code = COUNT + "\n".join(imports) + PROVE
    run(code)  # bytecode and page cache are there, as after the first start
    parts = json.loads(run(code).stdout.splitlines()[-1])
    total = {key: round(sum(found[key] for found in parts.values()), 3) for key in parts["ray"]}
    return {"parts": parts, "total": total, "packages_ms": packages("\n".join(imports))}


def packages(imports: str, most: int = 20) -> dict[str, int]:
    """{package: ms of its own modules}, from -X importtime; what modules do when they are first imported is theirs."""
    done = run("def part(name): pass\n" + imports, "-X", "importtime")
    own: defaultdict[str, int] = defaultdict(int)
    for match in re.finditer(r"^import time:\s+(\d+) \|\s+\d+ \|\s+(\w+)", done.stderr, re.MULTILINE):
        own[match[2]] += int(match[1])
    largest = sorted(own.items(), key=lambda entry: -entry[1])[:most]
    return {name: round(spent / 1000) for name, spent in largest}


ACTORS = """
import json, sys, time
import psutil
import verl_patches.prelude_patch
from verl_patches.trainer import ray_start
count, folder = int(sys.argv[1]), sys.argv[2]
begun = time.monotonic()
ray_start.start({}, num_cpus=count, include_dashboard=False, _temp_dir=folder, object_store_memory=1 << 27)
import ray
started = time.monotonic()
class Actor:
    def cpu(self):
        return time.process_time()
actors = [ray.remote(num_cpus=1)(Actor).remote() for _ in range(count)]
workers = ray.get([actor.cpu.remote() for actor in actors])
ready = time.monotonic()
times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
print(json.dumps({"workers": count, "ray_s": started - begun, "actors_s": ready - started,
                  "actor_cpu_s": sum(workers) / count, "cpu_s": sum(t.user + t.system for t in times)}))
ray.shutdown()
"""


def actors(count: int) -> dict:
    """Ray with `count` actors of one process each."""
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp") as folder:
        env = {**os.environ, **ENV, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-W", "ignore", "-c", ACTORS, str(count), folder]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, cwd=ROOT)
    found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    return {name: round(value, 2) for name, value in found.items()}


def smokes() -> list[dict]:
    """`start` of one step with 2 and with 4 workers."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for layout in ("ep2", "tp2ep2"):
            begun = time.monotonic()
            summary = run_smoke(folder, layout, "--steps", "1", "--train-layout", layout)
            start = {part: round(of["max_s"], 2) for part, of in summary["start"].items()}
            found.append({"workers": summary["ranks"], **start, "wall_s": round(time.monotonic() - begun, 1)})
    return found


def line_of(points: list[tuple[float, float]]) -> tuple[float, float]:
    """(value at 0, slope) of the least-squares line."""
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    return mean_y - slope * mean_x, slope


def model(imports: dict, ray: list[dict]) -> dict:
    """Costs of NODES x DIES workers from those of one worker and of Ray's actors."""
    total, workers = imports["total"], NODES * DIES
    fixed, each = line_of([(found["workers"], found["cpu_s"]) for found in ray])
    return {
        "workers": workers,
        "ray, CPU s": {"fixed": round(fixed, 2), "each worker": round(each, 2)},
        "imports, CPU s a node": round(DIES * total["cpu_s"], 1),
        "imports, s a node of 320 cores, each worker on a core of its own": round(total["cpu_s"], 1),
        "serial, s: worker 0 before the others": round(2 * total["cpu_s"], 1),
        "files opened": round(workers * total["opens"]),
        "look-ups": round(workers * total["lookups"]),
        "s at 50,000 metadata calls a second of a shared file system": round(
            workers * (total["opens"] + total["lookups"]) / 50_000, 1
        ),
    }


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smokes", type=int, default=1)
    parser.add_argument("--actors", type=int, nargs="+", default=[4, 8, 16])
    given = parser.parse_args()
    imports, ray = worker(), [actors(count) for count in given.actors]
    found = {"worker": imports, "ray": ray, "smoke": smokes() if given.smokes else [], "model": model(imports, ray)}
    print(json.dumps({**found, "python": sys.version.split()[0], "cpus": psutil.cpu_count()}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
