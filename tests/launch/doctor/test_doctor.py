"""Test `doctor` on this machine, across nodes with one difference, and over a real Ray and one that has gone."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest

from tests.runs import composed
from verl_patches.launch import ray_cluster
from verl_patches.launch.doctor import doctor
from verl_patches.launch.doctor.node_checks import Node
from verl_patches.launch.smoke import CONFIG_NAME
from verl_patches.patching.report import Finding


def run(*words):
    environ = {**os.environ, "VERL_PATCHES": "line=pypi,platform=cpu"}
    arguments = [sys.executable, "-m", "verl_patches", "doctor", *words]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=600, env=environ)


@pytest.fixture(scope="module")
def smoke():
    two = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "recipe.ray_address=auto"]
    return Node(composed(CONFIG_NAME, two).with_verl({"trainer.nnodes": 3}))


@pytest.fixture(scope="module")
def production():
    return Node(composed("deepseekv3_256die_true_weight").with_verl({"trainer.nnodes": 3}))


def make_answer(found="fine there", **changes):
    """Return ray_nodes.py's answer of three nodes; `changes` are the second one's, `found` is its disk finding."""
    nodes = []
    for number in range(3):
        rows = [Finding("disk", "fine", found=found if number == 1 else "fine there"), Finding("interface", "fine")]
        report = {"rows": list(map(asdict, rows))}
        node = {"id": str(number), "address": f"10.0.0.{number}", "here": number == 0}
        node["resources"] = {"GPU": 1, "NPU": 16, "CPU": 64, "object_store_memory": 2e11}
        node["clock"] = {"ahead_s": 0.0, "within_s": 0.001}
        node["answer"] = {"code": 0, "output": json.dumps(report), "error": ""}
        nodes.append(node | (changes if number == 1 else {}))
    return {"nodes": nodes}


def compared(node, answer):
    """Return {name: finding} of the rows about all nodes, and the findings of each node."""
    report = doctor.check_answer(node, answer)
    own = {row.name for row in doctor.NODE_ROWS}
    across = {one.name: one for one in report.findings if one.name not in own}
    return across, [one for one in report.findings if one.name in own]


def test_this_machine_is_fine_and_says_what_it_cannot_check():
    done = run(CONFIG_NAME, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["command"] == "doctor" and found["state"] == "fine"
    states = {row["name"].partition(":")[0]: row["state"] for row in found["rows"]}
    assert list(states) == [row.name for row in doctor.NODE_ROWS]
    without = {name for name, state in states.items() if state == "not run"}
    assert without == {"npu health", "npu memory", "npu links"}


def test_nodes_that_are_fine_pass_and_equal_findings_are_one_row(smoke, production):
    across, own = compared(production, make_answer(clock={"ahead_s": 0.9, "within_s": 0.002}))
    assert {one.state for one in across.values()} == {"fine"}
    assert [(one.name, one.where) for one in own] == [("disk", "all 3 nodes"), ("interface", "all 3 nodes")]
    _, own = compared(smoke, make_answer(found="full"))
    assert [one.where for one in own if one.name == "disk"] == ["10.0.0.0, 10.0.0.2", "10.0.0.1"]


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({"clock": {"ahead_s": -1.4, "within_s": 0.002}}, "clocks", "1.4 s behind most nodes"),
        ({"answer": None}, "nodes: report", "no answer within"),
        ({"answer": {"code": 1, "output": "", "error": "x\nno disk"}}, "nodes: report", "exit code 1: no disk"),
    ],
)
def test_one_node_that_differs_is_named(production, changes, name, text):
    across, _ = compared(production, make_answer(**changes))
    wrong = {key: one for key, one in across.items() if one.state == "problem"}
    assert list(wrong) == [name] and text in wrong[name].found and wrong[name].todo


def test_output_that_is_no_report_of_this_checkout_is_a_problem_of_its_node(production):
    output = '{"rows": [{"name": "disk"}]}'
    across, own = compared(production, make_answer(answer={"code": 0, "output": output, "error": ""}))
    assert across["nodes: report"].where == "10.0.0.1" and "not a report" in across["nodes: report"].found
    assert {one.where for one in own} == {"all 2 nodes"}


def test_lines_before_a_report_are_left_out(production):
    answer = make_answer(found="full")
    answer["nodes"][1]["answer"]["output"] = "a warning\n" + answer["nodes"][1]["answer"]["output"]
    across, own = compared(production, answer)
    assert "nodes: report" not in across and "10.0.0.1" in [one.where for one in own if one.name == "disk"]


def test_a_ray_that_does_not_answer_is_a_problem_and_this_node_is_checked():
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))  # bound, but nothing listens
        address = f"127.0.0.1:{refusing.getsockname()[1]}"
        done = run(CONFIG_NAME, f"recipe.ray_address={address}", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 1 and [row["name"] for row in found["rows"] if row["state"] == "problem"] == ["nodes"]
    assert f"no Ray answers at {address}" in found["rows"][0]["found"]
    assert found["counts"]["fine"] >= len(doctor.NODE_ROWS) - 5


def test_wrong_use_ends_with_2():
    assert run("no_such_config").returncode == 2
    done = run(CONFIG_NAME, "trainer.nnodes=2", "trainer.n_gpus_per_node=1")
    assert done.returncode == 2 and "give --this-node" in done.stderr


@pytest.mark.slow
def test_two_nodes_of_a_real_ray_report(smoke):
    """Use two raylets of this machine; in place of `doctor` each node runs a program that prints a report."""
    from ray.cluster_utils import Cluster

    code = (
        "import json, os, sys; print(json.dumps({'rows': [], 'nodes': [{'interface': 'lo', 'head': sys.argv[2], "
        "'preload': os.environ.get('LD_PRELOAD'), 'dies': os.environ.get('ASCEND_RT_VISIBLE_DEVICES')}]}))"
    )
    started = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**started, "include_dashboard": False})
    try:
        cluster.add_node(**started)
        address = cluster.address  # None after the end
        nodes = ray_cluster.list_nodes(address)
        assert [node["resources"]["GPU"] for node in nodes] == [1.0, 1.0]
        request = {"address": address, "command": ["-c", code], "limit_s": 600}
        answer = ray_cluster.ask_nodes(request, 600)
    finally:
        cluster.shutdown()
    for node in answer["nodes"]:  # head, and the environment that a worker has
        known = json.loads(node["answer"]["output"])["nodes"][0]
        assert (known["head"], known["preload"], known["dies"]) == (address, None, None)
    across, _ = compared(smoke, answer)
    assert across["clocks"].state == "fine"
    assert across["nodes"].state == "problem" and "nodes: report" not in across  # the config asks for three nodes
