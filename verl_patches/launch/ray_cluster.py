"""Join or start the Ray cluster of a run, set up its workers, and check the nodes of a running cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from omegaconf import OmegaConf

from verl_patches.errors import ConfigError, RecipeError, our_command
from verl_patches.platform import NO_DEVICE
from verl_patches.processes import port_holder
from verl_patches.run import ray_nodes
from verl_patches.run.environment import worker_environment
from verl_patches.spec import A3, RUN, RunSpec
from verl_patches.trainer.ray_start import HOOK

log = logging.getLogger(__name__)
ANSWER_S = 60
_OBJECT_STORE_BYTES = 256 << 20  # on a CPU, for batches of a tiny model
_STORE_SHARE, _STORE_MAX_BYTES = 0.3, 200 * 10**9  # defaults of `ray start` in ray/_private/ray_constants.py


def worker_settings(run: RunSpec) -> dict[str, dict[str, Any] | None]:
    """Return {engine, network} of every worker, as start_ray and send_settings (trainer/) take them.

    engine: verl's actor_rollout_ref section with the facts of the run; line a3 prepares its engine from it before
    Megatron is imported.
    network: how a worker on npu, or of several nodes, finds its network interface. Each is None where not needed.
    """
    recipe, engine = run.recipe, OmegaConf.to_container(run.verl.actor_rollout_ref, resolve=True)
    network = {"nodes": run.verl.trainer.nnodes, "interface": recipe.hccl.interface}
    return {
        "engine": {**engine, RUN: run.text()} if run.line == A3 else None,
        "network": network if recipe.platform == "npu" or run.verl.trainer.nnodes > 1 else None,
    }


def ray_options(run: RunSpec) -> dict[str, Any]:
    """Return the arguments of start_ray that join recipe.ray_address, or start a local Ray for this run alone."""
    recipe = run.recipe
    options = {
        "environment": worker_environment(run),
        **worker_settings(run),
        "log_to_driver": True,
        "runtime_env": {HOOK: recipe.worker_process_setup_hook},
    }
    if recipe.ray_address is not None:
        return {**options, "address": ray_nodes.answering_address(recipe.ray_address)}
    workers = run.verl.trainer.n_gpus_per_node
    npu = run.verl.trainer.device == "npu"
    devices: dict[str, Any] = {"resources": {"NPU": workers}} if npu else {"num_gpus": workers}
    if recipe.platform in NO_DEVICE:
        devices["object_store_memory"] = _OBJECT_STORE_BYTES
    return {
        **options,
        "address": "local",  # without it Ray would join a running one whose address file it finds
        **devices,
        "num_cpus": run.verl.ray_init.num_cpus or workers + 4,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",  # all of Ray's listeners are on the loopback
        "_temp_dir": os.environ.get("RAY_TMPDIR"),
    }


def object_store_bytes(run: RunSpec) -> int:
    """Return the most bytes of Ray's object store on this node, in /dev/shm: the run's, or `ray start`'s default."""
    if run.recipe.ray_address is None and run.recipe.platform in NO_DEVICE:
        return _OBJECT_STORE_BYTES
    return min(_STORE_MAX_BYTES, int(_STORE_SHARE * psutil.virtual_memory().total))


def list_nodes(address: str) -> list[dict[str, Any]]:
    """Return [{id, address, resources}] of the living nodes of the Ray at `address`; ConfigError if none answers."""
    return ask_nodes({"address": address}, ANSWER_S)["nodes"]


def ask_nodes(request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the answer of `ray_nodes.ask_nodes` at recipe.ray_address; raise ConfigError if no Ray answers."""
    try:
        return ray_nodes.ask_nodes(request, limit_s)
    except RecipeError as error:
        raise ConfigError(f"recipe.ray_address is {error}") from None


def require_nodes(run: RunSpec) -> None:
    """Refuse a run whose Ray could not be joined or started.

    Either no Ray answers, or too few of its nodes have the devices, or recipe.ray_port is taken on this machine.
    """
    port = run.recipe.ray_port
    if port is not None and (holder := port_holder(port, ("127.0.0.1", ""))):
        raise ConfigError(
            f"recipe.ray_port is {port}, which is taken on this machine by {holder}; nothing was started. Give another "
            "port, or null to use any free port"
        )
    if run.recipe.ray_address is not None:
        check_nodes(run, list_nodes(run.recipe.ray_address))
    elif run.verl.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes is {run.verl.trainer.nnodes}, but recipe.ray_address is null, which starts a Ray on this "
            f"machine only; start Ray on the nodes ({our_command('plan', 'CONFIG')} prints the commands) and set "
            "recipe.ray_address=auto"
        )


def check_nodes(run: RunSpec, nodes: Sequence[dict[str, Any]]) -> None:
    """Refuse `nodes` unless trainer.nnodes of them have trainer.n_gpus_per_node devices each."""
    resource, wanted = _device_resource(run), run.verl.trainer.n_gpus_per_node
    device_counts = sorted((node["address"], int(node["resources"].get(resource, 0))) for node in nodes)
    left_out = run.recipe.restart.exclude_nodes
    enough = [n for n in nodes_with_devices(run, nodes) if not {n["id"], n["address"]} & set(left_out)]
    if len(enough) < run.verl.trainer.nnodes:
        found = ", ".join(f"{address}: {count}" for address, count in device_counts[:20]) or "no node"
        found += f", without {', '.join(left_out)}" if left_out else ""
        raise ConfigError(
            f"the run needs {run.verl.trainer.nnodes} node(s) with {wanted} {resource} each "
            f"(trainer.nnodes, trainer.n_gpus_per_node); Ray has {len(enough)} such node(s) of {len(nodes)} ({found}). "
            f"Start the missing ones ({our_command('plan', 'CONFIG')} prints the commands) or correct the config"
        )


def nodes_with_devices(run: RunSpec, nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes of list_nodes() that have trainer.n_gpus_per_node devices."""
    resource, wanted = _device_resource(run), run.verl.trainer.n_gpus_per_node
    return [node for node in nodes if int(node["resources"].get(resource, 0)) >= wanted]


def reserve_left_out_nodes(run: RunSpec) -> None:
    """Keep this job off recipe.restart.exclude_nodes by giving their devices to placement groups that nothing uses.

    The driver calls this before verl places its workers. Nothing is started on these nodes, which may be faulty; Ray
    gives the devices back when the job ends. Names of nodes that do not exist are ignored.
    """
    import ray

    wanted, resource = set(run.recipe.restart.exclude_nodes), _device_resource(run)
    for node in ray_nodes.living_nodes() if wanted else ():
        address, count = node["address"], node["resources"].get(resource, 0)
        if count and wanted & {node["id"], address}:
            group = ray.util.placement_group([{resource: count, f"node:{address}": 0.001}], strategy="STRICT_PACK")
            if not group.wait(ANSWER_S):
                text = "node %s (recipe.restart.exclude_nodes) may get workers: another job holds devices of it"
                log.warning(text, address)


def _device_resource(run: RunSpec) -> str:
    return "NPU" if run.verl.trainer.device == "npu" else "GPU"
