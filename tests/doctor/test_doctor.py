"""`doctor` on this machine and across nodes: reports of the real collector with one field changed, and a real Ray."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import composed
from verl_patches.catalog import all_rows
from verl_patches.cli import doctor as command
from verl_patches.doctor import doctor
from verl_patches.doctor.doctor import ACROSS, NODE_ROWS, Nodes, all_nodes, report_of
from verl_patches.doctor.node_checks import Node, probe_settings
from verl_patches.launch import ray_cluster
from verl_patches.launch.smoke import CONFIG_NAME
from verl_patches.rules import RULES

ROOT = Path(__file__).resolve().parents[2]
TWO = ["trainer.nnodes=2", "trainer.n_gpus_per_node=1", "recipe.ray_address=auto"]
PROBED = {name: {"measured": {"seconds": 0.1, "bus_bytes_per_s": 1e9}, "world": 2} for name in ("gloo", "hccl")}


def run(*words):
    environ = {**os.environ, "VERL_PATCHES": "line=pypi,platform=cpu"}
    arguments = [sys.executable, "-m", "verl_patches", "doctor", *words]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=600, env=environ)


@pytest.fixture(scope="module")
def collected():
    """The report of this machine for the smoke run, by the command line."""
    done = run("--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def nodes_of(report, spec, **changes):
    """Nodes whose reports are `report`, but for `changes` of the second one: a fact, `clock`, `answer` or `address`."""
    reports = [copy.deepcopy(report) for _ in range(3)]
    entries = []
    for number, one in enumerate(reports):
        facts = one["nodes"][0]["facts"]
        facts["interface"] = {"name": "eth0", "address": f"10.0.0.{number}", "mtu": 1500}
        facts |= {"super_pod": "3", "hccs_only": True, "software": {"driver": "25.2.0", "firmware": "7.7.0.6.236"}}
        own = changes if number == 1 else {}
        facts |= {key: value for key, value in own.items() if key in facts}
        facts["image"] = {**report["nodes"][0]["facts"]["image"], **own.get("image", {})}
        answer = {"code": 0, "output": json.dumps(one), "error": ""}
        entry = {"id": str(number) * 8, "address": f"10.0.0.{number}", "resources": {"GPU": 1, "NPU": 16}}
        entry |= {"answer": answer, "clock": {"ahead_s": 0.0, "within_s": 0.001}}
        entries.append(entry | {key: value for key, value in own.items() if key in entry})
    return Nodes(Node(spec, all_rows(), RULES, has_model=False), entries, PROBED)


def across(nodes):
    """{name: finding} of the rows that compare nodes, of the first of equal names."""
    found = {}
    for finding in doctor.compare_nodes(nodes):
        found.setdefault(finding.name, finding)
    return found


@pytest.fixture(scope="module")
def smoke():
    return composed(CONFIG_NAME, TWO).with_verl({"trainer.nnodes": 3})


@pytest.fixture(scope="module")
def production():
    return composed("deepseekv3_256die_true_weight").with_verl({"trainer.nnodes": 3})


def test_this_machine_is_fine_and_says_what_it_cannot_check(collected):
    assert collected["command"] == "doctor" and collected["state"] == "fine"
    states = {row["name"].partition(":")[0]: row["state"] for row in collected["rows"]}
    assert list(states) == [row.name for row in NODE_ROWS]
    without = {name for name, state in states.items() if state == "not run"}
    assert without == {"npu health", "npu memory", "npu firmware", "npu links", "npu binding", "hccl"}
    assert collected["counts"]["not run"] == 6 and collected["counts"]["problem"] == 0
    gloo = next(row for row in collected["rows"] if row["name"] == "gloo")
    assert "2 processes, 16 MiB, lo" in gloo["found"] and "GB/s" in gloo["found"]
    facts = collected["nodes"][0]["facts"]
    assert len(facts["digest"]) == 64 and facts["image"]["ray"] == "2.42.1"


def test_equal_nodes_pass(collected, smoke, production):
    found = across(nodes_of(collected, smoke))
    assert {one.state for one in found.values()} <= {"fine", "note", "not run"}
    assert {name for name, one in found.items() if one.state == "not run"} == {"SuperPoD", "hccl, all nodes"}
    within_the_bound = nodes_of(collected, production, clock={"ahead_s": 0.9, "within_s": 0.002})
    assert {one.state for one in across(within_the_bound).values()} <= {"fine", "note"}


def test_a_node_with_another_checkout_is_named_though_it_has_rows_unknown_here(collected, production):
    nodes = nodes_of(collected, production, code="0" * 16)
    other = json.loads(nodes.nodes[1]["answer"]["output"])
    other["rows"].insert(0, {**other["rows"][0], "name": "a new row: part", "a new field": 1})
    nodes.nodes[1]["answer"]["output"] = json.dumps(other)
    rows = all_nodes(nodes)["rows"]
    assert rows[-1]["name"] == "a new row: part" and rows[-1]["where"].startswith("10.0.0.1")
    assert [row["where"] for row in rows if row["name"] == "checkout"] == ["10.0.0.1"]


def test_nodes_without_an_interface_are_all_named(collected, production):
    nodes = nodes_of(collected, production)
    for node in nodes.nodes:
        report = json.loads(node["answer"]["output"])
        report["nodes"][0]["facts"]["interface"] = None
        node["answer"]["output"] = json.dumps(report)
    found = [one for one in doctor.compare_nodes(nodes) if one.name == "network"]
    assert [(one.where, one.state) for one in found] == [(f"10.0.0.{n}", "problem") for n in range(3)]


@pytest.mark.parametrize(
    ("changes", "name", "text"),
    [
        ({"digest": "0" * 64}, "digest", "000000"),
        ({"code": "0" * 16}, "checkout", "000000"),
        ({"image": {"Python": "3.10.1"}}, "image", "Python 3.10.1, others 3."),
        ({"clock": {"ahead_s": -1.4, "within_s": 0.002}}, "clocks", "1.4 s behind most nodes"),
        ({"interface": {"name": "eth0", "address": "10.0.0.2", "mtu": 1500}}, "network", "as another node has"),
        ({"interface": {"name": "eth0", "address": "10.0.0.1", "mtu": 9000}}, "network", "eth0 has MTU 9000"),
        ({"super_pod": "4"}, "SuperPoD", "10.0.0.1: 4"),
        ({"answer": None}, "reports", "no answer within"),
        ({"resources": {"NPU": 8}}, "nodes", "10.0.0.1: 8"),
    ],
)
def test_one_node_that_differs_is_named(collected, production, changes, name, text):
    wrong = {one.name: one for one in across(nodes_of(collected, production, **changes)).values()}
    wrong = {key: one for key, one in wrong.items() if one.state == "problem"}
    assert list(wrong) == [name]
    assert text in wrong[name].found and wrong[name].todo
    assert "10.0.0.1" in wrong[name].where or name in ("SuperPoD", "nodes")
    assert report_of(all_nodes(nodes_of(collected, production, **changes))).exit_code == 1


def test_a_probe_that_fails_names_its_node(collected, smoke):
    nodes = nodes_of(collected, smoke)
    failed = Nodes(nodes.node, nodes.nodes, {"gloo": {"error": "10.0.0.1: connection refused"}})
    assert across(failed)["gloo, all nodes"].found == "10.0.0.1: connection refused"
    assert across(failed)["gloo, all nodes"].state == "problem"


def test_equal_findings_of_nodes_are_one_row(collected, smoke):
    nodes = nodes_of(collected, smoke)
    report = all_nodes(nodes)
    assert len(report["rows"]) == len(doctor.compare_nodes(nodes)) + len(collected["rows"])
    assert {row["where"].partition(":")[0] for row in report["rows"] if row["name"] == "gloo"} == {"all 3 nodes"}
    other = json.loads(nodes.nodes[1]["answer"]["output"])
    next(row for row in other["rows"] if row["name"] == "gloo")["found"] = "slow"
    nodes = nodes_of(collected, smoke, answer={"code": 0, "output": json.dumps(other), "error": ""})
    rows = [row for row in all_nodes(nodes)["rows"] if row["name"] == "gloo"]
    assert [row["where"] for row in rows] == ["10.0.0.0, 10.0.0.2", "10.0.0.1"]


def test_without_a_ray_this_node_is_checked_and_the_rest_is_not_run(collected, smoke, production, monkeypatch):
    monkeypatch.setattr(doctor, "this_node", lambda node: collected)
    for one, code in ((smoke, 0), (production, 1)):
        nodes = Nodes(Node(one, all_rows(), RULES, has_model=False), fault="no Ray answers there")
        report = report_of(all_nodes(nodes))
        compared = [f for f in report.findings if f.name in {row.name for row in ACROSS}]
        assert all("not run" in f.found for f in compared)
        assert report.exit_code == code


def test_wrong_use_ends_with_2():
    assert run("no_such_config").returncode == 2
    done = run(CONFIG_NAME, "trainer.nnodes=2", "trainer.n_gpus_per_node=1")
    assert done.returncode == 2 and "give --this-node" in done.stderr


def test_without_a_config_the_platform_decides(monkeypatch):
    monkeypatch.setenv("VERL_PATCHES", "line=pypi,platform=cpu")
    assert command._default() == CONFIG_NAME
    monkeypatch.delenv("VERL_PATCHES")
    assert command._default() == command.PRODUCTION


@pytest.mark.slow
def test_two_nodes_of_a_real_ray_report_and_sum(collected, smoke):
    """Two raylets of this machine; in place of `doctor` each node runs a program that prints a report."""
    from ray.cluster_utils import Cluster

    code = (
        "import json, os, sys; report = json.loads(sys.argv[1]); facts = report['nodes'][0]['facts']; "
        "facts['head'] = sys.argv[3]; facts['preload'] = os.environ.get('LD_PRELOAD'); "
        "facts['dies'] = os.environ.get('ASCEND_RT_VISIBLE_DEVICES'); print(json.dumps(report))"
    )
    settings = {key: probe_settings("gloo", 1, "lo", mib=1)[key] for key in ("backend", "local", "mib", "repeat")}
    started = {"num_cpus": 1, "num_gpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**started, "include_dashboard": False})
    try:
        cluster.add_node(**started)
        address = cluster.address  # None after the end
        nodes = ray_cluster.list_nodes(address)
        assert [node["resources"]["GPU"] for node in nodes] == [1.0, 1.0]
        request = {"address": address, "command": ["-c", code, json.dumps(collected)], "limit_s": 600}
        probes = {"gloo": {**settings, "limit_s": 600}, "broken": {**settings, "backend": "none", "limit_s": 600}}
        answer = ray_cluster.ask_nodes({**request, "probes": probes}, 600)
    finally:
        cluster.shutdown()
    found = Nodes(Node(smoke, all_rows(), RULES, has_model=False), answer["nodes"], answer["probes"])
    assert len(found.reports) == 2
    assert set(found.fact("head").values()) == {address}
    assert set(found.fact("preload").values()) == set(found.fact("dies").values()) == {None}  # as a worker has them
    rows = across(found)
    assert rows["clocks"].state == rows["digest"].state == rows["image"].state == "fine"
    assert rows["gloo, all nodes"].state == "fine" and "2 ranks" in rows["gloo, all nodes"].found
    assert "none" in answer["probes"]["broken"]["error"]
    assert rows["nodes"].state == "problem"  # the config has three
