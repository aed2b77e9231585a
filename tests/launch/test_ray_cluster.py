"""How many nodes a run finds in its Ray; that a real Ray answers is in test_doctor.py."""

import socket
from contextlib import nullcontext
from dataclasses import replace

import pytest

from tests.runs import composed
from verl_patches import ray_nodes
from verl_patches.config.environment import worker_environment
from verl_patches.config.resolve import changed
from verl_patches.errors import ConfigError
from verl_patches.launch.ray_cluster import check_nodes, list_nodes, require_nodes, worker_settings

NPU16 = {"resources": {"NPU": 16.0, "CPU": 8.0}}


@pytest.fixture(scope="module")
def run():
    return composed("deepseekv3_256die_true_weight")


def test_a_taken_port_of_the_runs_own_ray_is_refused(run):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"recipe.ray_port is {port}, which is taken"):
            require_nodes(replace(run, recipe=replace(run.recipe, ray_port=port, ray_address=None)))


def test_enough_nodes_pass_and_missing_ones_are_counted(run):
    nodes = [{"id": str(n), "address": f"10.0.0.{n}", **NPU16} for n in range(16)]
    check_nodes(run, nodes)
    check_nodes(run, [{**node, "address": "10.0.0.1"} for node in nodes])  # each counts
    with pytest.raises(ConfigError, match=r"16 node\(s\) with 16 NPU each.*Ray has 15 such node\(s\) of 15"):
        check_nodes(run, nodes[1:])
    nodes[3] = {"id": "3", "address": "10.0.0.3", "resources": {"NPU": 8.0}}
    with pytest.raises(ConfigError, match=r"15 such node\(s\) of 16 .*10\.0\.0\.3: 8"):
        check_nodes(run, nodes)


def test_several_nodes_need_a_ray_that_runs(run):
    alone = changed(run, {"recipe.ray_address": None})
    with pytest.raises(ConfigError, match=r"recipe.ray_address is null, which starts a Ray on this machine only"):
        require_nodes(alone)


def test_an_address_without_ray_is_refused(monkeypatch):
    monkeypatch.setattr(ray_nodes, "__name__", "no_such_program")
    with pytest.raises(ConfigError, match=r"no Ray answers at .*no_such_pr.*--dry-run prints the ray commands"):
        list_nodes("127.0.0.1:1")


def test_workers_of_several_nodes_choose_their_interface_on_cpus_too():
    nodes = ["trainer.nnodes=4", "trainer.n_gpus_per_node=1", "recipe.ray_address=auto"]
    one, several = composed("deepseekv3_tiny_cpu"), composed("deepseekv3_tiny_cpu", nodes)
    assert worker_settings(one)["network"] is None and worker_environment(one)["GLOO_SOCKET_IFNAME"] == "lo"
    assert worker_settings(several)["network"] == {"nodes": 4, "interface": None}
    assert "GLOO_SOCKET_IFNAME" not in worker_environment(several)


OWN, A = "127.0.0.1:47120", "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("found", "latest", "variable", "taken"),
    [
        (set(), None, "", "auto"),
        ({OWN, A}, OWN, "", A),
        ({OWN, A}, OWN, "auto", A),  # environment.py gives the driver recipe.ray_address as RAY_ADDRESS
        ({OWN}, OWN, "", None),
    ],
)
def test_auto_joins_no_ray_that_a_run_started_for_itself(monkeypatch, found, latest, variable, taken):
    """Ray would look for it at this machine's other address, without end."""
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: found)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: latest)
    monkeypatch.setenv("RAY_ADDRESS", variable)
    assert ray_nodes.address_of("10.0.0.2:1") == "10.0.0.2:1"
    with nullcontext() if taken else pytest.raises(ConnectionError, match=OWN):
        assert ray_nodes.address_of("auto") == taken
