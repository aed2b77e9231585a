"""Test the rendered scripts on four nodes in network namespaces: up.sh, doctor and a smoke over all four, down.sh.

No process is warm (tests/warm): forks of a warm interpreter are in its namespaces, not in those of a node.
"""

import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from loop_runs import ROOT, STREAMS

from tests.launch.jobs.namespaces import Nodes
from verl_patches.launch.jobs.job import load_job
from verl_patches.launch.jobs.render import render

pytestmark = pytest.mark.nightly
NODES = 4


@pytest.fixture(scope="module")
def nodes():
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with Nodes(NODES, Path(folder), real_ssh=True) as made:
            yield made


def timed(name, command):
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, **STREAMS)
    print(f"{name}: {time.monotonic() - start:.0f} s")
    return done


def test_four_nodes_from_up_to_a_training_step_and_down_again(nodes, tmp_path):
    overrides = ["trainer.nnodes=4", "trainer.n_gpus_per_node=1", f"recipe.ray_address={nodes.hosts[0]}:6379"]
    program = [sys.executable, "-m", "verl_patches"]
    doctor = [*program, "doctor", "deepseekv3_tiny_cpu", *overrides, "--json"]
    smoke = [*program, "smoke", "layout=tp2ep2", "--steps", "1", "--run", "r", *overrides]
    smoke.append(f"recipe.output_root={tmp_path}")
    line = f"{shlex.join(doctor)} > {tmp_path}/doctor.json; {shlex.join(smoke)}"
    job = {
        "name": "four",
        "provider": "ssh",
        "nodes": NODES,
        "dies": 1,
        "device": "GPU",
        "hosts": nodes.hosts,
        "interface": "eth0",
        "checkout": str(ROOT),
        "python": sys.executable,
        "folder": str(nodes.shared),
        "logs": str(tmp_path / "logs"),
        "wait_s": 900,
        "command": ["bash", "-c", line],
        "ssh": {"command": nodes.ssh},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
    render(load_job(tmp_path / "job.yaml"), tmp_path / "scripts", "job.yaml")

    def call(script):
        return timed(script, ["bash", str(tmp_path / "scripts" / script)])

    try:
        up = call("up.sh")
        assert up.returncode == 0 and "all 4 nodes of job four have joined Ray" in up.stdout, up.stdout[-6000:]
        ran = call("run.sh")
        assert ran.returncode == 0, ran.stdout[-6000:]
        report = json.loads((tmp_path / "doctor.json").read_text())
        rows = {row["name"]: row["state"] for row in report["rows"]}
        assert rows["nodes"] == rows["clocks"] == "fine", rows
        summary = json.loads((tmp_path / "r" / "latest" / "summary.json").read_text())
        assert summary["exit"] == "ok" and summary["steps"][0]["logprob_delta"]["max"] < 1e-5
        again = call("up.sh")
        assert again.returncode == 0 and again.stdout.count("is up already") == NODES, again.stdout
    finally:
        down = call("down.sh")
    assert down.returncode == 0, down.stdout
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {
        f"node-{n}-{host}" for n, host in enumerate(nodes.hosts)
    }
    assert [nodes.processes(number) for number in range(NODES)] == [[]] * NODES
