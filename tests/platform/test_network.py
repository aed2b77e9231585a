"""Test the interface of a node's rendezvous: it is found by the route, and never the loopback between nodes."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

from verl_patches.errors import ConfigError
from verl_patches.platform.npu import INTERFACE_VARIABLES, interface_towards, set_interface

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = "127.0.0.1:6379"


@pytest.fixture(autouse=True)
def node(monkeypatch):
    for name in INTERFACE_VARIABLES:
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
    return monkeypatch


def set_variables():
    return {name: os.environ[name] for name in INTERFACE_VARIABLES}


def test_one_node_may_use_the_loopback_and_several_may_not():
    set_interface(1, head=LOOPBACK)
    assert set_variables() == {"HCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo", "TP_SOCKET_IFNAME": "lo"}
    for name in INTERFACE_VARIABLES:
        os.environ[name] = ""
    with pytest.raises(ConfigError, match="loopback lo.*trainer.nnodes is 2"):
        set_interface(2, head=LOOPBACK)
    assert set(set_variables().values()) == {""}


def test_the_interface_is_that_of_the_route():
    interfaces = psutil.net_if_addrs().items()
    addresses = {a.address: name for name, all_of in interfaces for a in all_of if a.family == socket.AF_INET}
    assert {address: interface_towards(f"{address}:6379") for address in addresses} == addresses


def test_the_configured_interface_must_be_on_the_node():
    with pytest.raises(ConfigError, match=r"interface is eth99; expected an interface of node \S+: .*\blo\b"):
        set_interface(1, "eth99", LOOPBACK)
    with pytest.raises(ConfigError, match="loopback lo .*, from recipe.hccl.interface"):
        set_interface(16, "lo", LOOPBACK)
    set_interface(1, "lo", "no.such.host.invalid:1")  # no route is looked up
    assert set_variables()["GLOO_SOCKET_IFNAME"] == "lo"


def test_what_the_node_sets_goes_before_the_configuration(node):
    for name in INTERFACE_VARIABLES:
        node.setenv(name, "bond7")
    set_interface(16, "lo", LOOPBACK)
    assert set(set_variables().values()) == {"bond7"}
    node.setenv("HCCL_SOCKET_IFNAME", "=bond7,lo")
    with pytest.raises(ConfigError, match="HCCL_SOCKET_IFNAME==bond7,lo"):
        set_interface(16, None, LOOPBACK)


def test_without_a_head_that_can_be_asked_it_is_refused_and_no_ray_is_started():
    with pytest.raises(ConfigError, match=r"no\.such\.host\.invalid:6379"):
        set_interface(16, head="no.such.host.invalid:6379")
    assert not ray.is_initialized()
    with pytest.raises(ConfigError, match="recipe.hccl.interface.*HCCL_"):
        set_interface(1)
    assert not ray.is_initialized() and set(set_variables().values()) == {""}


FIND_INTERFACE_CODE = (
    "from verl_patches.platform.npu import set_interface\nimport os, sys\nset_interface(2, head=sys.argv[1])\n"
    "print(os.environ['GLOO_SOCKET_IFNAME'])"
)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("ip"), reason="network namespaces need root and iproute2")
def test_two_nodes_name_their_interfaces_differently():
    """Join two network namespaces by a cable whose ends have different names: each node finds its own."""
    head, other = (f"vp{os.getpid()}{end}" for end in "ab")
    ends = {head: ("up0", "10.77.0.1"), other: ("down9", "10.77.0.2")}

    def ip(words, check=True):
        return subprocess.run(["ip", *words.split()], capture_output=True, text=True, check=check)

    try:
        for name in ends:
            made = ip(f"netns add {name}", check=False)
            if made.returncode:
                pytest.skip(f"no network namespaces here: {made.stderr.strip()}")
        ip(f"link add up0 netns {head} type veth peer name down9 netns {other}")
        for name, (interface, address) in ends.items():
            ip(f"-n {name} address add {address}/24 dev {interface}")
            ip(f"-n {name} link set {interface} up")
            ip(f"-n {name} link set lo up")
        for name, (interface, _) in ends.items():
            command = ["ip", "netns", "exec", name, sys.executable, "-c", FIND_INTERFACE_CODE, "10.77.0.1:6379"]
            env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
            done = subprocess.run(command, capture_output=True, text=True, env=env)
            assert (done.returncode, done.stdout.strip()) == (0, interface), done.stderr
    finally:
        for name in ends:
            ip(f"netns delete {name}", check=False)
