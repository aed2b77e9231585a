"""Test the checks of one node: an Atlas A3 node made of published outputs with faults, and this machine."""

import resource
import socket
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.platform import recorded
from tests.runs import composed
from verl_patches.errors import RecipeError
from verl_patches.launch.doctor import node_checks, npu_checks
from verl_patches.launch.doctor.doctor import NODE_ROWS
from verl_patches.launch.doctor.node_checks import Machine, Node, NodeCheck, Result
from verl_patches.plan.memory_plan import node_host_bytes
from verl_patches.run.resolve import changed_run
from verl_patches.upstream.pins import load_pins

PORT = {"-ip": recorded.IP, "-link": recorded.LINK, "-net_health": recorded.NET_HEALTH}
INFINITE = resource.RLIM_INFINITY
A3_VERSIONS = {name: version.replace("*", "9") for name, version in load_pins().line("a3").packages.items()}


def tool(changes=()):
    """Return the Machine.run of a healthy A3 node; `changes`: {a command: its output}, {a missing tool: None}."""
    changes = dict(changes)

    def run(command):
        command = [Path(command[0]).name, *command[1:]]
        words = " ".join(command)
        for start, text in changes.items():
            if start in (words, command[0]):
                if text is None:
                    raise FileNotFoundError(command[0])
                return text
        if command[0] == "hccn_tool":
            return PORT.get(command[3], "usage") if len(command) > 3 else "usage"
        known = {"info": recorded.NPU_SMI_A3, "hccs": recorded.HCCS}
        known["spod-info"] = recorded.SUPER_POD
        return known[command[3] if len(command) > 3 else "info"]

    return run


@pytest.fixture(scope="module")
def production():
    return composed("deepseekv3_256die_true_weight", ["recipe.hccl.interface=lo"])


@pytest.fixture
def make_node(production, tmp_path, monkeypatch):
    """Make a node of production's config; arguments are changes of its tools' outputs and of its Machine."""
    monkeypatch.setattr(npu_checks, "followed_peaks", lambda run: {"peak_bytes": 50 * 10**9})
    monkeypatch.setattr(node_checks, "RATE_BYTES", {True: 1 << 20})

    def make(changes=(), **machine):
        return Node(production, Machine(**{"run": tool(changes), "environ": {}, "cgroup": tmp_path, **machine}))

    return make


def findings(node, *names):
    """Return {name: finding} of some rows."""
    rows = [row for row in NODE_ROWS if row.name in names]
    assert len(rows) == len(names)
    return {found.name: found for row in rows for found in row.findings(node, npu=node.npu)}


NPU = ("npu health", "npu memory", "npu links")


def test_a_healthy_node_passes_every_row_of_its_dies(make_node):
    found = findings(make_node(), *NPU)
    assert {one.state for one in found.values()} == {"fine"}
    assert found["npu memory"].found.startswith("at least 65.4 GB free")


ONE_EACH = {  # a fault of each kind, on another die or card each
    "npu-smi info -t hccs -i 6 -c 1": recorded.HCCS.replace(": OK", ": NOK"),
    "npu-smi info": recorded.NPU_SMI_A3.replace("| OK            | 163.9", "| Critical      | 163.9").replace(
        "3106 / 65536", "31877/ 65536"
    ),
    "hccn_tool -i 5 -link -g": recorded.LINK_DOWN,
    "hccn_tool -i 5 -net_health -g": recorded.NET_FAULT,
    "hccn_tool -i 9 -net_health -g": "\x00??",
}
FAULTS = [  # outputs, {name of each finding that is not fine: a text that it has}
    (
        ONE_EACH,
        {
            "npu health: die 8 (card 4, chip 0)": "Critical",
            "npu memory: die 10 (card 5, chip 0)": "35.3 GB free of 68.7",
            "npu links: die 5 (card 2, chip 1)": "port 10.86.1.80: link DOWN, net health Fault",
            "npu links: die 9 (card 4, chip 1)": "expected a line 'net health status', found",
            "npu links: die 13 (card 6, chip 1)": "HCCS is NOK",
        },
    ),
    (
        {"npu-smi info": recorded.NPU_SMI_BUSY},
        {
            "npu health: dies": "3 dies",
            "npu memory: card 0, chip 0": "process 632268 (python3.1) holds 197 MB",
            "npu memory: die 15 (card 7, chip 1)": "35.3 GB free",
        },
    ),
    ({"npu-smi info": recorded.NPU_SMI_NO_DRIVER}, dict.fromkeys(NPU, "npu-smi info printed 'dcmi module init")),
    ({"npu-smi": None, "hccn_tool": None}, dict.fromkeys(NPU, "not run: npu-smi is not installed")),
    ({"hccn_tool": None}, {"npu links": "not run: hccn_tool is not installed"}),
]


@pytest.mark.parametrize(("changes", "expected"), FAULTS, ids=["one each", "busy", "driver", "tools", "hccn_tool"])
def test_each_fault_has_its_own_row_and_what_to_do(make_node, changes, expected):
    found = findings(make_node(changes), *NPU)
    wrong = {name: one for name, one in found.items() if one.state != "fine"}
    assert wrong.keys() == expected.keys()
    for name, text in expected.items():
        assert wrong[name].state == "problem" and text in wrong[name].found and wrong[name].todo


def test_a_tool_of_the_driver_is_found_where_it_is_not_on_path(make_node, tmp_path):
    (tmp_path / "driver" / "tools").mkdir(parents=True)
    (tmp_path / "driver" / "tools" / "echo_tool").symlink_to("/bin/echo")
    machine = Machine(ascend=tmp_path)
    assert machine.output("echo_tool", "-i", "0") == "-i 0\n" and machine.output("no_such_tool") is None


def test_ports_without_addresses_are_a_note_while_hccs_is_healthy(make_node):
    """Check the note, which names the SuperPoD, within which dies exchange over HCCS, so that an odd node shows."""
    nothing = {f"hccn_tool -i {n} -ip -g": recorded.NO_IP for n in range(16)}
    found = findings(make_node(nothing), "npu links")
    assert {one.state for one in found.values()} == {"note"}
    assert found["npu links: ports"].found.startswith("16 of 16 dies have no RoCE address")
    assert found["npu links: ports"].found.endswith("SuperPoD 3")
    sick = {**nothing, "npu-smi info -t hccs -i 0 -c 0": recorded.HCCS.replace(": OK", ": NOK")}
    assert findings(make_node(sick), "npu links")["npu links: die 0 (card 0, chip 0)"].state == "problem"


def test_each_wrong_package_and_the_driver_have_a_row(make_node, tmp_path):
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "version.info").write_text("Version=24.1.rc3\npackage_version=24.1.rc3\n")
    mixed = {name: A3_VERSIONS.get(name) for name in load_pins().line("a3").packages} | {"torch": "2.4.0"}
    found = findings(make_node(distribution=mixed.get, ascend=tmp_path), "versions")
    assert found["versions: torch"].todo.startswith("install torch 2.5.1")
    assert (found["versions: driver"].found, found["versions: driver"].todo) == ("24.1.rc3", "install driver 25.2.0")


def test_limits_and_memory(make_node, tmp_path, monkeypatch):
    limits = {resource.RLIMIT_NOFILE: 1024, resource.RLIMIT_NPROC: INFINITE, resource.RLIMIT_MEMLOCK: 1024}
    monkeypatch.setattr(resource, "getrlimit", lambda number: (limits[number], INFINITE))
    (tmp_path / "pids").mkdir()
    (tmp_path / "pids" / "pids.max").write_text("4096\n")
    found = findings(make_node(), "limits", "memory")
    wrong = {name: one.found for name, one in found.items() if one.state == "problem" and name.startswith("limits")}
    assert wrong == {
        "limits: open files": "1024",
        "limits: locked memory": "1024",
        "limits: processes of the container": "4096",
    }
    assert found["limits: processes"].state == "fine" and "docker run --ulimit" in found["limits: open files"].todo
    memory = found["memory: host"]
    assert memory.state == "problem" and "771.5 by the workers" in memory.expected  # docs/256-die-runbook.md
    need = node_host_bytes(make_node().run, psutil.virtual_memory().total)
    least = need["pinned_bytes"] + need["workers_bytes"]
    # the object store may be full
    for left, state in ((least - 1, "problem"), (least, "note"), (need["node_bytes"], "fine")):
        monkeypatch.setattr(node_checks, "available_bytes", lambda cgroup, left=left: left)
        assert findings(make_node(), "memory")["memory: host"].state == state


def test_the_limit_of_a_container_bounds_the_memory(tmp_path):
    (tmp_path / "memory.max").write_text(f"{3 << 20}\n")
    assert node_checks.available_bytes(tmp_path) == 3 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert node_checks.available_bytes(tmp_path) > 3 << 20


def test_a_tool_that_does_not_end_costs_its_own_rows_and_is_not_asked_again(make_node, monkeypatch, tmp_path):
    asked = []

    def hanging(command):
        asked.append(command)
        raise subprocess.TimeoutExpired(command, 30)

    found = findings(make_node(run=hanging), *NPU, "memory")
    assert {found[name].found.partition(":")[0] for name in NPU} == {"TimeoutExpired"} and len(asked) == 1
    assert "memory: host" in found
    (tmp_path / "hangs").write_text("#!/bin/bash\nexec sleep 600\n")
    (tmp_path / "hangs").chmod(0o755)
    monkeypatch.setattr(node_checks, "TOOL_S", 0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        Machine().output(str(tmp_path / "hangs"))


def test_a_check_that_hangs_or_raises_is_left_behind_with_what_it_saw(monkeypatch):
    ended = threading.Event()

    def look():
        yield Result(True, "first")
        ended.wait()

    monkeypatch.setattr(node_checks, "CHECK_S", 0.1)
    found = NodeCheck("a", "expected", "todo", look).findings(npu=False)
    ended.set()
    assert found[-1].state == "problem" and "not finished within" in found[-1].found

    def broken():
        yield Result(True, "first")
        raise RecipeError("broken")

    found = NodeCheck("a", "expected", "todo", broken).findings(npu=False)
    assert [(one.state, one.found) for one in found] == [("fine", "first"), ("problem", "RecipeError: broken")]


def test_a_taken_port_is_named(make_node, production):
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        there = changed_run(production, {"recipe.hccl.base_port": taken - 3})
        found = findings(replace(make_node(), run=there), "ports")["ports: HCCL, free"]
    assert found.state == "problem" and str(taken) in found.found and "ss -ltnp" in found.todo


def test_the_interface_is_the_nodes_own_the_configs_or_the_one_towards_the_head(make_node, production):
    """Check HCCL's variable, which may be a prefix or name what to exclude; the loopback is refused there too."""

    def found(interface=None, nodes=1, **variables):
        node = make_node(environ={"HCCL_SOCKET_IFNAME": "^docker0", **variables})
        run = changed_run(production, {"recipe.hccl.interface": interface}).with_verl({"trainer.nnodes": nodes})
        return findings(replace(node, run=run), "interface")["interface"]

    assert found().found.startswith("lo (one node)") and found(GLOO_SOCKET_IFNAME="lo,eth1").state == "fine"
    absent = found("eth99")
    assert absent.state == "problem" and "recipe.hccl.interface is eth99" in absent.found
    absent = found(GLOO_SOCKET_IFNAME="eth98")
    assert "Correct or unset it before" in absent.found and "null" not in absent.found  # a variable is unset, not null
    assert "GLOO_SOCKET_IFNAME" in found(None, 2, GLOO_SOCKET_IFNAME="lo").found
    before_ray = found(None, 2)
    assert (before_ray.state == "note") == (not before_ray.found.endswith("none"))


def test_disk_holds_the_checkpoints_of_the_model_and_is_measured(make_node, production, tmp_path):
    saving = changed_run(production, {"recipe.output_root": str(tmp_path)}).with_verl({"trainer.save_freq": 10})
    found = findings(replace(make_node(), run=saving), "disk")
    assert "at least 2 checkpoints, 9.39 TB each" in found["disk"].found  # docs/operate.md
    assert found["disk"].state == "problem"
    (rate,) = (one for name, one in found.items() if name.startswith("disk: rate in"))
    assert rate.state == "fine" and rate.found.startswith("writes ") and list(tmp_path.iterdir()) == []


def test_a_check_that_could_not_be_made_is_a_problem_on_npu_only():
    row = NodeCheck("a", "expected", "todo", lambda: [Result(None, "no tool")])
    assert [(f.state, f.found) for f in row.findings(npu=True)] == [("problem", "not run: no tool")]
    assert [(f.state, f.todo) for f in row.findings(npu=False)] == [("not run", "")]
