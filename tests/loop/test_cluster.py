"""Four nodes in network namespaces, reached as hosts over ssh: cluster up, doctor, a smoke over all four, cluster down.

A program in place of `ssh` enters the namespace of a host and binds a folder of its own for Ray; the rest is as on four
machines. No process is warm (tests/warm): forks of a warm interpreter are in its namespaces, not in those of a node.
Skipped where namespaces cannot be made; tests/cluster has what needs none.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml
from loop_runs import ROOT, STREAMS

from tests.cluster.namespaces import namespaces

pytestmark = pytest.mark.full
NODES, NET = 4, "10.97.41"
HOSTS = [f"{NET}.{number + 1}" for number in range(NODES)]
SSH = """#!/bin/bash
# ssh HOST LINE: run LINE in the namespace of HOST, where a folder of the node's own is the job's
host=$1 line=$2 number=${1##*.}
enter='mount --bind "$0" "$1" && exec bash -c "$2"'
exec ip netns exec PREFIX-$number bash -c "$enter" FOLDER/$number FOLDER/job "$line"
"""


@pytest.fixture(scope="module")
def nodes(short_folder):
    """(prefix of the namespaces' names, short folder with one of each node's own)."""
    for name in ("job", *map(str, range(1, NODES + 1))):
        (short_folder / name).mkdir()
    with namespaces(HOSTS) as prefix:
        yield prefix, short_folder


@pytest.fixture(scope="module")
def short_folder():
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def timed(name, command):
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, **STREAMS, timeout=600)
    print(f"{name}: {time.monotonic() - start:.0f} s")
    return done


def test_four_nodes_from_cluster_up_to_a_training_step_and_down_again(nodes, tmp_path):
    prefix, folder = nodes
    ssh = folder / "ssh"
    ssh.write_text(SSH.replace("PREFIX", prefix).replace("FOLDER", str(folder)))
    ssh.chmod(0o755)
    overrides = ["trainer.nnodes=4", "trainer.n_gpus_per_node=1", f"recipe.ray_address={HOSTS[0]}:6379"]
    program = [sys.executable, "-m", "verl_patches"]
    doctor = [*program, "doctor", "grpo_deepseekv3_tiny_cpu", *overrides, "--json"]
    smoke = [*program, "smoke", "--train-layout", "tp2ep2", "--steps", "1", "--run", "r", *overrides]
    smoke.append(f"recipe.output_root={tmp_path}")
    line = f"{shlex.join(doctor)} > {tmp_path}/doctor.json; {shlex.join(smoke)}"  # doctor: no jemalloc here, for one
    job = {
        "name": "four",
        "provider": "ssh",
        "nodes": NODES,
        "dies": 1,
        "device": "GPU",
        "hosts": HOSTS,
        "interface": "eth0",
        "checkout": str(ROOT),
        "python": sys.executable,
        "folder": str(folder / "job"),
        "logs": str(tmp_path / "logs"),
        "wait_s": 240.0,
        "command": ["bash", "-c", line],
        "ssh": {"command": [str(ssh)]},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))

    def cluster(verb, *options):
        command = [sys.executable, "-m", "verl_patches", "cluster", verb, str(tmp_path / "job.yaml"), *options]
        return timed(verb, command)

    try:
        up = cluster("up", "--run")
        assert up.returncode == 0 and "all 4 nodes of job four are in Ray" in up.stdout, up.stdout[-6000:]
        report = json.loads((tmp_path / "doctor.json").read_text())
        rows = {row["name"]: row["state"] for row in report["rows"]}
        assert len(report["nodes"]) == NODES and rows["nodes"] == rows["gloo, all nodes"] == "fine", rows
        summary = json.loads((tmp_path / "r" / "summary.json").read_text())
        assert summary["exit"] == "ok" and summary["steps"][0]["logprob_delta"]["max"] < 1e-5
        looked = cluster("status", "--json")
        assert looked.returncode == 0 and json.loads(looked.stdout)["counts"]["fine"] == NODES + 1
    finally:
        down = cluster("down")
    assert down.returncode == 0, down.stdout
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {f"node-{n}-{host}" for n, host in enumerate(HOSTS)}
    left = [
        p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or ())
    ]
    assert left == []
