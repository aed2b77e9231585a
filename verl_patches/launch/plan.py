"""What a run would use, as plain data: ranks, groups, checks, memory, patch rows, environment, commands.

Starts nothing and writes nothing; torch and verl are not imported.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from omegaconf import DictConfig

from verl_patches.config import environment
from verl_patches.config.checks import Check, check_config
from verl_patches.config.compose import hf_config_of, keys_of, model_shape_of, rollout_library
from verl_patches.config.recipe import VLLM_DTYPES
from verl_patches.launch.step_plan import Workload, step_sections
from verl_patches.layout.inventory import ModelShape, build_inventory
from verl_patches.layout.parallel import ParallelLayout, rollout_layout_of, train_layout_of
from verl_patches.memory.expected import A3_DIE_BYTES, Setting, in_dtype, peaks
from verl_patches.memory.schedule import (
    SCHEDULE,
    VERL,
    Schedule,
    direct_sync,
    schedule_followed,
    sleeps_by_vllm,
    staying,
    switches_of,
)
from verl_patches.model.mindspeed.arguments import explain
from verl_patches.patching.spec import PatchSpec
from verl_patches.upstream.checkouts import LINE, Trees, verl_check

DRIVER_MODULE = "verl_patches.main_grpo"
TRAIN_GROUPS = ("tp", "cp", "dp", "pp", "etp", "ep", "edp")
ROLLOUT_GROUPS = ("tp", "instance", "instance-dp", "ep")
_SIZED = ("layers", "train experts", "rollout experts")  # checks that the memory plan needs


def driver_command(config_name: str, overrides: Sequence[str]) -> list[str]:
    """The command line of the driver process, started by the launcher with the run's environment."""
    return [sys.executable, "-m", DRIVER_MODULE, "--config-name", config_name, *overrides]


def build_plan(
    config: DictConfig,
    config_name: str,
    overrides: Sequence[str],
    rows: Iterable[PatchSpec],
    trees: Trees,
    workload: Workload = Workload(),  # noqa: B008 frozen
) -> dict[str, Any]:
    """Everything a run of `config` would use, as JSON-ready data; `ok` is false if any check failed.

    `rows` is the catalogue. Keys: config, ok, checks, train, rollout (None where that layout cannot be built), memory
    (`memory_plan`) and step_plan's step, traffic, host and ports (None without layouts), patches, environment,
    commands. Ranks and groups are whole lists.
    Files named in `overrides` must exist here; those that only the config names may be on other machines. Raises
    ConfigError for switches that name no row.
    """
    checks = [
        *check_config(config, must_exist=keys_of(overrides)),
        _verl(config.recipe.line, trees),
        *engine_checks(config),
    ]
    model, ok = model_shape_of(config), {check.name: check.ok for check in checks}
    experts = model.n_routed_experts
    train = rollout = memory = None
    if ok["train layout"]:
        layout = train_layout_of(config)
        stages = range(layout.pp) if ok["layers"] else ()
        train = {
            "layout": str(layout),
            "groups": {name: layout.groups(name) for name in TRAIN_GROUPS if layout.size(name) > 1},
            "layers": [list(layout.stage_layers(stage, model.num_hidden_layers)) for stage in stages],
            "ranks": _ranks(layout, ("tp", "dp", "pp", "ep"), experts if ok["train experts"] else None),
        }
    if ok["rollout layout"]:
        layout = rollout_layout_of(config)
        groups = {name: layout.groups(name) for name in ROLLOUT_GROUPS}
        rollout = {
            "layout": str(layout),
            "instances": layout.edp,
            "dp_per_instance": layout.dp // layout.edp,
            "groups": {name: ranks for name, ranks in groups.items() if len(ranks[0]) > 1},
            "ranks": _ranks(layout, ("edp", "dp", "tp"), experts if ok["rollout experts"] else None, True),
        }
    patches = patch_table(config, rows)
    sections = dict.fromkeys(("step", "traffic", "host", "ports"))
    if train and rollout and all(ok[name] for name in _SIZED):
        on = [row["id"] for row in patches if row["on"]]
        memory = memory_plan(config, model, on)
        checks.append(memory_check(memory))
        if ok.get("weight sync", True):
            setting = setting_of(config, train_layout_of(config).dp)
            sections = step_sections(config, on, *schedule_of(config, on), setting, workload)
    return {
        "config": config_name,
        "ok": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "train": train,
        "rollout": rollout,
        "memory": memory,
        **sections,
        "patches": patches,
        "environment": [asdict(variable) for variable in environment.derive(config, trees=trees)],
        "commands": commands(config, config_name, overrides, trees),
    }


def _verl(line: str, trees: Trees) -> Check:
    """A plan can be made over any verl; a start needs the line's own."""
    fits, said = verl_check(line, trees)
    return Check("verl", True, said if fits else f"a start is refused: {said}", note=not fits)


def engine_checks(config: DictConfig) -> list[Check]:
    """Line a3: what the training engine refuses of the configuration and the model, each by name."""
    if config.recipe.line != LINE:
        return []
    rows = explain(config, hf_config_of(config))
    refused = [f"{row.key} is {row.value!r}: {row.why}" for row in rows if row.how == "refused"]
    held = f"none of {len(rows)} keys is refused; config --explain shows what each becomes"
    return [Check("engine arguments", False, text) for text in refused] or [Check("engine arguments", True, held)]


def _ranks(
    layout: ParallelLayout, axes: tuple[str, ...], experts: int | None, rest_on_last: bool = False
) -> list[dict[str, Any]]:
    found = []
    for rank in range(layout.world_size):
        place = layout.coordinates(rank)
        entry: dict[str, Any] = {"rank": rank, **{axis: getattr(place, axis) for axis in axes}}
        if experts is not None:
            held = layout.local_experts(rank, experts, rest_on_last)
            entry["experts"] = [held.start, held.stop - 1]
        found.append(entry)
    return found


def patch_table(config: DictConfig, rows: Iterable[PatchSpec]) -> list[dict[str, Any]]:
    """One {id, on, reason, kind, target} a row of the catalogue for the line, platform and patches of `config`."""
    rows, switches = tuple(rows), environment.switches_of(config)
    switches.check_against({row.id: row for row in rows})
    table = []
    for row in rows:
        wanted, reason = switches.decide(row)
        table.append({"id": row.id, "on": wanted, "reason": reason, "kind": row.kind, "target": row.target})
    return table


def commands(config: DictConfig, config_name: str, overrides: Sequence[str], trees: Trees) -> list[dict[str, str]]:
    """The commands to type, in order: [{where, command}]; HEAD and NODE stand for addresses of the operator's nodes.

    `ray start` gets this checkout and the upstream trees (the same paths on every node) before the node's own
    PYTHONPATH: its workers import verl_patches, and without trees they import the image's upstream packages.
    """
    found, nodes, dies = [], config.trainer.nnodes, config.trainer.n_gpus_per_node
    places = [str(environment.REPOSITORY), *map(str, trees.folders)]
    here = f"PYTHONPATH={shlex.quote(os.pathsep.join(places))}${{PYTHONPATH:+:$PYTHONPATH}} "
    if config.recipe.ray_address is not None:
        device = f""" --resources='{{"NPU": {dies}}}'""" if config.trainer.device == "npu" else ""
        quiet = "--include-dashboard=false --disable-usage-stats"
        found.append(("head node", f"{here}ray start --head --node-ip-address=HEAD --port=6379 {quiet}{device}"))
        if nodes > 1:
            other = f"{here}ray start --address=HEAD:6379 --node-ip-address=NODE --disable-usage-stats{device}"
            found.append((f"each of the other {nodes - 1} nodes", other))
    train = ["python", "-m", "verl_patches", "train", "--config-name", config_name, *trees.option, *overrides]
    found.append(("head node" if found else "this machine", here + shlex.join(train)))
    driver = shlex.join(driver_command(config_name, overrides))
    found.append(("started by the last one, not to be typed", driver))
    return [{"where": where, "command": command} for where, command in found]


def memory_plan(config: DictConfig, model: ModelShape, rows: Collection[str]) -> dict[str, Any]:
    """{modelled, hbm_bytes, followed, swapped, orders}: modelled bytes of the worst rank in every phase of a step.

    `orders` holds memory.expected's `peaks` for our order of a step, for verl's on this line with verl's own weight
    sync, and for the run's own order, which `followed` names; it depends on `rows`, the ids of the rows that are on.
    `hbm_bytes` is that of an A3 die, None on other platforms, where the KV cache is not modelled. Activations, HCCL's
    buffers and CANN's context are not counted. ConfigError where sizes do not divide.
    """
    inventory = in_dtype(build_inventory(model), VLLM_DTYPES[config.recipe.dtype])
    layouts = train_layout_of(config), rollout_layout_of(config)
    followed, stays = schedule_of(config, rows)
    recipe, direct, skip = config.recipe, direct_sync(rows), config.recipe.train.skip_old_log_prob
    ours = setting_of(config, layouts[0].dp)
    gathered = replace(ours, bucket_bytes=None)
    compared = [
        (order.without("old_log_prob") if skip else order, setting)
        for order, setting in ((SCHEDULE, ours), (VERL[recipe.line], gathered))
    ]
    if followed.name not in (order.name for order, _ in compared):
        compared.append((followed, ours if direct else gathered))
    return {
        "modelled": True,
        "hbm_bytes": A3_DIE_BYTES if recipe.platform == "npu" else None,
        "followed": followed.name,
        "orders": [peaks(order, inventory, *layouts, setting, stays) for order, setting in compared],
        "swapped": recipe.train.swap_optimizer,
    }


def memory_check(memory: Mapping[str, Any]) -> Check:
    """Whether the highest modelled peak of the order that the run follows fits on a die."""
    order = next(order for order in memory["orders"] if order["order"] == memory["followed"])
    highest, hbm = max(order["phases"], key=lambda phase: phase["peak_bytes"]), memory["hbm_bytes"]
    found = f"{highest['peak_bytes'] / 1e9:.2f} GB at the peak, in {highest['phase']} on rank {highest['rank']}"
    if hbm is None:
        return Check("memory", True, f"{found}; not compared with a die on this platform")
    if highest["peak_bytes"] <= hbm:
        return Check("memory", True, f"{found}; a die has {hbm / 1e9:.2f} (modelled)")
    largest = max(highest["bytes"], key=highest["bytes"].get)
    held = f"the largest part is {largest}, {highest['bytes'][largest] / 1e9:.2f} GB"
    return Check("memory", False, f"{found} (modelled), expected at most the {hbm / 1e9:.2f} GB of a die; {held}")


def schedule_of(config: DictConfig, rows: Collection[str]) -> tuple[Schedule, frozenset[str]]:
    """(the memory schedule that the run follows, memory groups that never move); `rows`: ids of those that are on."""
    recipe, actor, ref = config.recipe, config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.ref.megatron
    synced = recipe.weight_sync.enabled and direct_sync(rows)
    switches = switches_of(rows, vllm_sleep=sleeps_by_vllm(config.actor_rollout_ref.rollout, recipe), synced=synced)
    stays = staying(
        param_offload=actor.param_offload,
        optimizer_offload=actor.optimizer_offload or recipe.train.swap_optimizer,
        ref_offload=ref.param_offload,
        own_sleep_mode=switches["own_sleep_mode"],
        synced=synced,
    )
    return schedule_followed(recipe.line, skip_old_log_prob=recipe.train.skip_old_log_prob, **switches), stays


def setting_of(config: DictConfig, replicas: int) -> Setting:
    """What of the configuration changes bytes of memory groups, for `replicas` data-parallel replicas."""
    recipe, rollout = config.recipe, config.actor_rollout_ref.rollout
    return Setting(
        train_library="mindspeed" if recipe.line == LINE else "megatron-local",
        rollout_library=rollout_library(config),
        bucket_bytes=recipe.reshard.bucket_bytes,
        swap_pieces=recipe.train.swap_optimizer_times if recipe.train.swap_optimizer else None,
        kv_share=rollout.gpu_memory_utilization if recipe.platform == "npu" else 0.0,
        tensor_cache_bytes=_cached_bytes(config) // replicas if recipe.tensor_cache.enabled else 0,
        absorbed_copies=recipe.platform == "npu" or recipe.line == LINE,  # MindSpeed's view on the CPU too
    )


def _cached_bytes(config: DictConfig) -> int:
    """Most bytes of the tensor cache for all samples of a step: int32 ids, fp32 log-probs of the responses.

    Log-probs are those of rollout, of the old policy unless that pass is left out, and of the reference if a loss
    needs them.
    """
    data, actor = config.data, config.actor_rollout_ref.actor
    columns = 2  # ids of the responses, log-probs of rollout
    if not config.recipe.train.skip_old_log_prob:
        columns += 1
    if actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        columns += 1
    tokens = data.max_prompt_length + data.max_response_length * columns
    return 4 * data.train_batch_size * config.actor_rollout_ref.rollout.n * tokens
