"""Join or start the Ray cluster of a run, set up its workers, and check the nodes of a running cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
from omegaconf import OmegaConf

from verl_patches.errors import ConfigError, RecipeError, our_command
from verl_patches.plan.memory_plan import DEVICE_FOLDER, object_store_bytes
from verl_patches.platform import NO_DEVICE
from verl_patches.run import ray_nodes
from verl_patches.run.environment import worker_environment
from verl_patches.run.files import recorded_bytes
from verl_patches.spec import A3, RUN, RunSpec
from verl_patches.trainer.ray_start import HOOK
from verl_patches.values import size_text

log = logging.getLogger(__name__)
ANSWER_S = 60


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
        devices["object_store_memory"] = object_store_bytes(run, psutil.virtual_memory().total)
    return {
        **options,
        "address": "local",  # without it Ray would join a running one whose address file it finds
        **devices,
        "num_cpus": run.verl.ray_init.num_cpus or workers + 4,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",  # all of Ray's listeners are on the loopback
        "_temp_dir": os.environ.get("RAY_TMPDIR"),
    }


def list_nodes(address: str) -> list[dict[str, Any]]:
    """Return `living_nodes` of the Ray at `address`; ConfigError if none answers."""
    return ask_nodes({"address": address}, ANSWER_S)["nodes"]


def ask_nodes(request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the answer of `ray_nodes.ask_nodes` at recipe.ray_address; raise ConfigError if no Ray answers."""
    try:
        return ray_nodes.ask_nodes(request, limit_s)
    except RecipeError as error:
        raise ConfigError(f"recipe.ray_address is {error}") from None


def require_nodes(run: RunSpec) -> None:
    """Refuse a run whose Ray could not be joined or started: no Ray answers, or its nodes lack resources."""
    if run.recipe.ray_address is not None:
        check_nodes(run, list_nodes(run.recipe.ray_address))
    elif run.verl.trainer.nnodes > 1:
        raise ConfigError(
            f"trainer.nnodes is {run.verl.trainer.nnodes}, but recipe.ray_address is null, which starts a Ray on this "
            f"machine only; start Ray on the nodes ({our_command('plan', 'CONFIG')} prints the commands) and set "
            "recipe.ray_address=auto"
        )
    else:
        cpus, workers = run.verl.ray_init.num_cpus, run.verl.trainer.n_gpus_per_node
        if cpus is not None and cpus <= workers:
            raise ConfigError(
                f"ray_init.num_cpus is {cpus}; expected {workers + 1} or more, one for each worker and one for the "
                "controller, as Ray would wait for them without end; these need not be cores. Raise it, or set null"
            )
        if run.platform == "npu" and (found := len([*DEVICE_FOLDER.glob("davinci[0-9]*")])) < workers:
            raise ConfigError(
                f"trainer.n_gpus_per_node is {workers}, but this machine has {found} NPUs ({DEVICE_FOLDER}/davinci*); "
                "lower it, give the container more, or set recipe.ray_address to join a Ray of several nodes"
            )
        _require_object_store(run, object_store_bytes(run, psutil.virtual_memory().total))


def check_nodes(run: RunSpec, nodes: Sequence[dict[str, Any]]) -> None:
    """Refuse `nodes` without the devices and CPUs of the workers, or the CPU and the memory of the controller.

    verl reserves a device and a CPU for each worker and waits for them without end, as Ray does for the controller's
    CPU. The controller puts the batch of each step into the object store of its node, the one that is `here`.
    """
    resource, wanted = _device_resource(run), run.verl.trainer.n_gpus_per_node
    counts = sorted((n["address"], *(n["resources"].get(key, 0) for key in (resource, "CPU"))) for n in nodes)
    left_out = run.recipe.restart.exclude_nodes
    enough = [n for n in nodes_with_devices(run, nodes) if not {n["id"], n["address"]} & set(left_out)]
    if len(enough) < run.verl.trainer.nnodes:
        found = ", ".join(f"{name}: {devices:g} {resource}, {cpus:g} CPU" for name, devices, cpus in counts[:20])
        found = found or "no node"
        found += f", without {', '.join(left_out)}" if left_out else ""
        raise ConfigError(
            f"the run needs {run.verl.trainer.nnodes} node(s) with {wanted} {resource} and {wanted} CPU each "
            "(trainer.nnodes, trainer.n_gpus_per_node), and one CPU more here, for the controller; Ray has "
            f"{len(enough)} such node(s) of {len(nodes)} ({found}). Start the missing ones "
            f"({our_command('plan', 'CONFIG')} prints the ray commands; --num-cpus sets a node's CPUs) or correct the "
            "config"
        )
    for own in (node["resources"] for node in nodes if node["here"]):
        if own.get("CPU", 0) < 1:
            raise ConfigError("Ray has 0 CPU on this node, expected 1 for the controller; start it with --num-cpus=1")
        _require_object_store(run, own["object_store_memory"])


def _require_object_store(run: RunSpec, size: float) -> None:
    """Refuse an object store of the controller's node that cannot hold the batch of a step."""
    if size < (need := recorded_bytes(run)):
        raise ConfigError(
            f"Ray's object store on this node has {size_text(size)}, expected {size_text(need)} or more for the batch "
            "of a step (data.train_batch_size x rollout.n responses); start Ray here with "
            f"--object-store-memory={2 * need}, or lower the batch or its lengths"
        )


def nodes_with_devices(run: RunSpec, nodes: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the nodes of list_nodes() with trainer.n_gpus_per_node devices, and CPUs for the run's processes there."""
    resource, wanted = _device_resource(run), run.verl.trainer.n_gpus_per_node
    found = [node for node in nodes if node["resources"].get(resource, 0) >= wanted]
    return [node for node in found if node["resources"].get("CPU", 0) >= wanted + node["here"]]


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
