"""Test how many nodes a run finds in its Ray, and dead addresses; test_doctor.py has a real Ray."""

import socket
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.launch import ray_cluster
from verl_patches.launch.ray_cluster import check_nodes, list_nodes, ray_options, require_nodes
from verl_patches.run import ray_nodes
from verl_patches.run.resolve import changed_run

STORE = {"object_store_memory": 1e11}
NPU16 = {"resources": {"NPU": 16.0, "CPU": 16.0, **STORE}, "here": False}


@pytest.fixture(scope="module")
def run():
    return composed("deepseekv3_256die_true_weight")


def test_enough_nodes_pass_and_missing_ones_are_counted(run):
    nodes = [{"id": str(n), "address": f"10.0.0.{n}", **NPU16} for n in range(16)]
    check_nodes(run, nodes)
    with pytest.raises(ConfigError, match=r"16 node\(s\) with 16 NPU and 16 CPU each.*Ray has 15 such node\(s\) of 15"):
        check_nodes(run, nodes[1:])
    nodes[3] = {**nodes[3], "resources": {"NPU": 8.0, "CPU": 640.0, **STORE}}
    with pytest.raises(ConfigError, match=r"15 such node\(s\) of 16 .*10\.0\.0\.3: 8 NPU, 640 CPU"):
        check_nodes(run, nodes)


def test_too_few_cpus_and_a_small_object_store_are_refused(run):
    """Check this because Ray and verl would wait for CPUs without end, and a batch would go to the disk each step."""
    nodes = [{"id": str(n), "address": f"10.0.0.{n}", **NPU16} for n in range(16)]
    head = {"id": "h", "address": "10.0.1.0", "resources": {"CPU": 1.0, **STORE}, "here": True}
    check_nodes(run, [head, *nodes])
    with pytest.raises(ConfigError, match=r"and one CPU more here.*15 such node\(s\) of 16.*10.0.0.0: 16 NPU, 16 CPU"):
        check_nodes(run, [{**nodes[0], "here": True}, *nodes[1:]])
    with pytest.raises(ConfigError, match="0 CPU on this node, expected 1 for the controller"):
        check_nodes(run, [{**head, "resources": STORE}, *nodes])
    with pytest.raises(ConfigError, match="object store on this node has 1.0 GB, expected"):
        check_nodes(run, [{**head, "resources": {"CPU": 1.0, "object_store_memory": 1e9}}, *nodes])
    own = composed("deepseekv3_tiny_cpu", ["layout=pypi/tp2ep2"])
    require_nodes(changed_run(own, {"ray_init.num_cpus": own.world_size + 1}))
    with pytest.raises(ConfigError, match="ray_init.num_cpus is 4; expected 5 or more"):
        require_nodes(changed_run(own, {"ray_init.num_cpus": own.world_size}))


def test_the_npus_of_a_ray_that_a_run_starts_itself_are_counted(monkeypatch, tmp_path):
    run = composed("deepseekv3_tiny_cpu", ["layout=pypi/tp2ep2"])
    run = replace(run, recipe=replace(run.recipe, platform="npu"))
    monkeypatch.setattr(ray_cluster, "DEVICE_FOLDER", tmp_path)
    for number in range(4):
        with pytest.raises(ConfigError, match=f"trainer.n_gpus_per_node is 4, but this machine has {number} NPUs"):
            require_nodes(run)
        (tmp_path / f"davinci{number}").touch()
    require_nodes(run)


def test_several_nodes_need_a_ray_that_runs(run):
    alone = changed_run(run, {"recipe.ray_address": None})
    with pytest.raises(ConfigError, match=r"recipe.ray_address is null, which starts a Ray on this machine only"):
        require_nodes(alone)


@contextmanager
def stale_address(listens):
    """Yield a HOST:PORT that is held all the time: it refuses connections, or `listens` and never answers."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        if listens:
            held.listen()
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def no_ray_here(monkeypatch, tmp_path):
    """Hide all raylets from Ray, and return the path where its file of the latest address would be."""
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


@pytest.mark.parametrize("listens", [False, True], ids=["refuses", "never answers"])
@pytest.mark.parametrize("source", ["recipe.ray_address", "RAY_ADDRESS", "the file"])
def test_a_stale_address_is_named_with_where_it_was_found_and_what_to_do(no_ray_here, monkeypatch, source, listens):
    with stale_address(listens) as address:
        given, todo = "auto", "remove that file"
        if source == "recipe.ray_address":
            given, todo = address, "correct the address"
        elif source == "RAY_ADDRESS":
            monkeypatch.setenv("RAY_ADDRESS", address)
            todo = "unset RAY_ADDRESS"
        else:
            no_ray_here.write_text(address)
            source = str(no_ray_here)
        with pytest.raises(ConfigError) as refused:
            ray_nodes.answering_address(given, limit_s=2.0)
    text = str(refused.value)
    assert f"no Ray answers at {address}, the address of " in text and source in text and todo in text
    assert ("no answer within 2 s" in text) == listens and ("refused" in text) == (not listens)


def test_every_start_asks_first(no_ray_here, monkeypatch):
    """Check a command that asks the nodes in its own process, and a driver; without any address auto says so."""
    with pytest.raises(ConfigError, match="no Ray runs here, RAY_ADDRESS is unset, and there is no file"):
        ray_nodes.answering_address("auto")
    with stale_address(listens=False) as address:
        with pytest.raises(ConfigError, match=f"recipe.ray_address is .*no Ray answers at {address}.* plan CONFIG"):
            list_nodes(address)
        joined = composed("deepseekv3_tiny_cpu", [f"recipe.ray_address={address}"])
        with pytest.raises(ConfigError, match=f"no Ray answers at {address}"):
            ray_options(joined)
    assert (
        ray_options(changed_run(joined, {"recipe.ray_address": None}))["address"] == "local"
    )  # not the one whose address file Ray would find


OWN, A = "127.0.0.1:47120", "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("found", "latest", "variable", "taken"),
    [
        ({A}, A, "", A),
        ({OWN, A}, OWN, "", A),
        ({"[::1]:5", A}, "10.0.0.9:1", "", A),  # the newest Ray has ended
        ({OWN}, OWN, "", None),
    ],
)
def test_auto_joins_no_ray_that_a_run_started_for_itself(monkeypatch, found, latest, variable, taken):
    """Check this because Ray would look for it at this machine's other address, without end."""
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", lambda: found)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: latest)
    monkeypatch.setenv("RAY_ADDRESS", variable)
    with nullcontext() if taken else pytest.raises(ConfigError, match=OWN if found else "no Ray runs here"):
        assert ray_nodes._find_address("auto")[0] == taken
