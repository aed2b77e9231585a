"""Test a run on three nodes of which one loses its link: network namespaces with a raylet and a rank each.

The tests are skipped if namespaces cannot be made. They print times; docs/operate.md has those of one run.
"""

import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.launch.jobs.namespaces import Nodes

pytestmark = pytest.mark.nightly
STEPS = 12  # of two seconds, of which the first is saved when the link goes down
NODES = 3
ALL_THERE = f"""
import ray, sys, time
ray.init(address=f"{{sys.argv[1]}}:6379", _node_ip_address=sys.argv[1], log_to_driver=False)
while len([node for node in ray.nodes() if node["Alive"]]) < {NODES}:
    time.sleep(0.5)
"""
WAIT_S = 600  # for what Ray does by itself


@pytest.fixture
def nodes():
    """Make nodes with `run`, which starts a process of this repository on one of them."""
    short = tempfile.TemporaryDirectory(prefix="r-", dir="/tmp", ignore_cleanup_errors=True)  # for Ray's sockets
    with short as folder, Nodes(NODES, Path(folder), net="10.97.42") as made:
        env = {**os.environ, "RAY_TMPDIR": str(made.shared), "PYTHONPATH": str(ROOT)}
        env["VERL_PATCHES"] = "line=pypi,platform=cpu"
        made.run = functools.partial(made.start, env=env, cwd=ROOT, text=True)
        yield made


def alive(processes):
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def raylets(nodes, tmp_path):
    """Return the processes of the nodes' raylets once all nodes are in one Ray."""
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=4", "--num-gpus=1"]
    ray += ["--disable-usage-stats", "--object-store-memory=100000000"]
    quiet = {"stdout": (tmp_path / "ray.log").open("w"), "stderr": subprocess.STDOUT}
    head = ["--head", "--port=6379", "--include-dashboard=false"]
    found = []
    for number, host in enumerate(nodes.hosts):
        where = head if number == 0 else [f"--address={nodes.hosts[0]}:6379"]
        found.append(nodes.run(number, *ray, *where, f"--node-ip-address={host}", **quiet))
        time.sleep(10 if number == 0 else 0)  # `ray start --address` itself retries for less
    assert nodes.run(0, sys.executable, "-c", ALL_THERE, nodes.hosts[0]).wait(WAIT_S) == 0
    return found


def test_a_run_goes_on_without_a_node_whose_link_is_down(nodes, raylets, tmp_path):
    """Cut off, after the first step, one of two nodes with a rank, not the driver's.

    The try must end with that node's name, and nothing may be left there.
    """
    program = [sys.executable, "-m", "verl_patches", "smoke"]
    smoke = [*program, "layout=tp2ep2", "--steps", str(STEPS), "--run", "r"]
    smoke += ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", f"recipe.ray_address={nodes.hosts[0]}:6379"]
    smoke += ["trainer.save_freq=1", "trainer.resume_mode=auto", "recipe.restart.max_restarts=1"]
    output = (tmp_path / "smoke.log").open("w+")
    run = nodes.run(0, *smoke, f"recipe.output_root={tmp_path}", stdout=output, stderr=subprocess.STDOUT)
    starts = [tmp_path / "r" / start for start in ("0001", "0002")]
    saved, begun = starts[0] / "checkpoints" / "global_step_1" / "manifest.json", time.monotonic()
    while not saved.is_file():
        assert run.poll() is None and time.monotonic() - begun < WAIT_S, (tmp_path / "smoke.log").read_text()[-4000:]
        time.sleep(0.5)
    with_rank = [n for n in (1, 2) if list(nodes.folder.glob(f"{n}/**/rank_*.beat"))]
    raylet = raylets[with_rank[0]].pid
    begun = time.monotonic()
    cut_off = [psutil.Process(raylet), *psutil.Process(raylet).children(recursive=True)]
    nodes.cut(with_rank[0])
    code = run.wait(WAIT_S * 2)
    summary = json.loads((starts[1] / "summary.json").read_text())
    assert code == 0 and summary["exit"] == "ok", (tmp_path / "smoke.log").read_text()[-4000:]
    (restart,) = summary["restarts"]
    lost = nodes.hosts[with_rank[0]]
    found = re.search(rf"LostNodeError: node {lost} with rank \d is lost: .* last seen in (\w+)", restart["reason"])
    assert found, restart
    print(restart)
    while alive(cut_off):
        assert time.monotonic() - begun < 3 * WAIT_S, alive(cut_off)
        time.sleep(0.5)
    print(f"on the node that was cut off all had ended {time.monotonic() - begun:.0f} s after the cut")
    assert summary["resumed_step"] >= 1
    assert [step["step"] for step in summary["steps"]] == [*range(summary["resumed_step"] + 1, STEPS + 1)]
