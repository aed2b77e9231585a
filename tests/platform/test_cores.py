"""Test the cores of each die's worker, on faked machines."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.platform.recorded import NPU_SMI_A3
from verl_patches.platform.npu.cores import bind_cores, core_sets, numa_topology
from verl_patches.platform.npu.npu_tools import parse_npu_smi

BUSES = [die.bus for die in parse_npu_smi(NPU_SMI_A3).dies]
PER_NODE = 40  # cores of each of eight NUMA nodes of an Atlas A3


def make_sysfs(folder, nodes):
    """Make sysfs of a machine with the dies of NPU_SMI_A3; nodes: the text of each numa_node file, None: no file."""
    for bus, node in zip(BUSES, nodes, strict=True):
        device = folder / "bus/pci/devices" / bus.lower()
        device.mkdir(parents=True)
        if node is not None:
            (device / "numa_node").write_text(f"{node}\n")
    for node in range(8):
        place = folder / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(f"{node * PER_NODE}-{(node + 1) * PER_NODE - 1}\n")
    return folder


@given(
    nodes=st.lists(st.none() | st.integers(0, 3), min_size=1, max_size=16),
    allowed=st.sets(st.integers(0, 63), min_size=1),
)
def test_sets_are_disjoint_and_within_the_cpuset(nodes, allowed):
    node_cores = {node: set(range(node * 16, node * 16 + 16)) for node in range(4)}
    if len(allowed) < len(nodes):
        with pytest.raises(ValueError, match="allowed cores"):
            core_sets(nodes, node_cores, allowed)
        return
    sets, origin = core_sets(nodes, node_cores, allowed)
    together = [core for each in sets for core in each]
    assert len(sets) == len(nodes) and all(sets)
    assert len(together) == len(set(together)) and set(together) <= allowed
    if origin == "of its NUMA node":
        assert all(set(each) <= node_cores[node] for each, node in zip(sets, nodes, strict=True))
    else:
        assert set(together) == allowed


def test_each_die_gets_cores_of_its_node_and_shares_them_with_the_others_there(tmp_path):
    nodes = [7 - place // 2 for place in range(16)]
    found = numa_topology(BUSES, make_sysfs(tmp_path, nodes))
    assert found[0] == nodes
    sets, origin = core_sets(*found, set(range(320)))
    assert origin == "of its NUMA node" and sets[0] == list(range(280, 300)) and sets[1] == list(range(300, 320))


@pytest.mark.parametrize("says", [None, -1, 0])
def test_without_a_useful_node_each_die_gets_an_equal_part(tmp_path, says):
    sets, origin = core_sets(*numa_topology(BUSES, make_sysfs(tmp_path, [says] * 16)), set(range(320)))
    assert [len(each) for each in sets] == [20] * 16 and origin.startswith("an equal part")


def write_npu_smi(folder, text, code=0):
    (folder / "npu-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    (folder / "npu-smi").chmod(0o755)


def test_all_threads_are_bound_within_the_cpuset(tmp_path, monkeypatch):
    bound, allowed = {}, set(range(100, 132))
    write_npu_smi(tmp_path, NPU_SMI_A3)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: bound.update({thread: cores}))
    assert "2 cores from 106 to 107" in bind_cores("3", make_sysfs(tmp_path / "sys", [-1] * 16))
    assert bound.keys() >= {os.getpid()} and {tuple(each) for each in bound.values()} == {(106, 107)}


@pytest.mark.parametrize(("text", "cores_there", "die"), [("no table", 32, "3"), (NPU_SMI_A3, 32, "16")])
def test_what_is_not_known_is_said_and_nothing_bound(tmp_path, monkeypatch, text, cores_there, die):
    write_npu_smi(tmp_path, text)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores_there)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: pytest.fail("bound"))
    assert "not bound to cores" in bind_cores(die, make_sysfs(tmp_path / "sys", [0] * 16))
