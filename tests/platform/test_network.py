"""Test the interface of a node's rendezvous: it is found by the route, and never the loopback between nodes."""

import os
import socket

import psutil
import pytest
import ray

from verl_patches.errors import ConfigError
from verl_patches.platform.npu import INTERFACE_VARIABLES, interface_towards, set_interface

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
