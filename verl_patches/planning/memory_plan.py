"""The memory of a run as plain data: the worst die of each phase, the fullest node, and the settings that fit a die.

Everything is modelled: planning/expected.py (groups), planning/activations.py and planning/other_memory.py (the rest).
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from omegaconf import DictConfig, OmegaConf

from verl_patches.config import hccl
from verl_patches.config.compose import graph_arguments, rollout_library
from verl_patches.config.recipe import VLLM_DTYPES
from verl_patches.layout.inventory import Inventory, ModelShape, build_inventory
from verl_patches.layout.parallel import ParallelLayout, rollout_layout_of, train_layout_of
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
from verl_patches.planning.activations import UNBALANCED, Passes
from verl_patches.planning.expected import A3_SEEN_BYTES, Alike, Setting, group_bytes, peaks, phase_peak, simulated
from verl_patches.planning.other_memory import host_bytes
from verl_patches.upstream.checkouts import LINE

DEVICES = Path("/dev")


def memory_plan(config: DictConfig, model: ModelShape, rows: Collection[str]) -> dict[str, Any]:
    """{modelled, hbm_bytes, followed, swapped, orders, communicators, host, not_modelled}: bytes of the worst rank.

    `orders` holds memory.expected's `peaks` for our order of a step, for verl's on this line with verl's own weight
    sync, and for the run's own order, which `followed` names; it depends on `rows`, the ids of the rows that are on.
    Activations are counted on line a3, HCCL's buffers and CANN's context on platform npu. `hbm_bytes` is what a process
    sees of an A3 die, None on other platforms, where the KV cache is not modelled. `host`: {bytes: of a node by group,
    node_bytes, limit_bytes (`host_limit`)}. ConfigError where sizes do not divide.
    """
    inventory, layouts = _inventory(model, VLLM_DTYPES[config.recipe.dtype]), _layouts(config)
    setting, schedule, stays = _setting(config, inventory, layouts, rows), _followed(config, rows), _stays(config, rows)
    direct, skip = direct_sync(rows), config.recipe.train.skip_old_log_prob
    gathered = replace(setting, bucket_bytes=None)
    compared = [
        (order.without("old_log_prob") if skip else order, each)
        for order, each in ((SCHEDULE, setting), (VERL[config.recipe.line], gathered))
    ]
    if schedule.name not in (order.name for order, _ in compared):
        compared.append((schedule, setting if direct else gathered))
    npu = config.recipe.platform == "npu"
    return {
        "modelled": True,
        "hbm_bytes": A3_SEEN_BYTES if npu else None,
        "followed": schedule.name,
        "orders": [peaks(order, inventory, *layouts, each, stays) for order, each in compared],
        "swapped": config.recipe.train.swap_optimizer,
        "communicators": _communicators(config, model) if npu else [],
        "host": _host(config, inventory, layouts, setting, schedule, stays),
        "not_modelled": _not_modelled(setting, npu, len(graph_arguments(config).get("graph_batch_sizes") or ())),
    }


def followed_schedule(
    config: DictConfig, model: ModelShape, rows: Collection[str]
) -> tuple[Schedule, frozenset[str], Setting]:
    """The run's own order, the memory groups that never move, and the setting of its bytes."""
    inventory, layouts = _inventory(model, VLLM_DTYPES[config.recipe.dtype]), _layouts(config)
    return _followed(config, rows), _stays(config, rows), _setting(config, inventory, layouts, rows)


def followed_peaks(config: DictConfig, model: ModelShape, rows: Collection[str]) -> dict[str, Any]:
    """Only memory.expected's `peaks` of the run's own order."""
    schedule, stays, setting = _own_order(config, model, rows)
    return peaks(schedule, _inventory(model, VLLM_DTYPES[config.recipe.dtype]), *_layouts(config), setting, stays)


def _own_order(
    config: DictConfig, model: ModelShape, rows: Collection[str]
) -> tuple[Schedule, frozenset[str], Setting]:
    """`followed_schedule`, without buffers of our weight sync where verl's own runs."""
    schedule, stays, setting = followed_schedule(config, model, rows)
    return schedule, stays, setting if direct_sync(rows) else replace(setting, bucket_bytes=None)


def settings_that_fit(
    config: DictConfig, model: ModelShape, rows: Collection[str]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """({key: value} with which the configuration's own layout fits a die, its phases with them, as `peaks` has them).

    The fewest recomputed layers of a stage, and where it is needed smaller micro batches of log-probs and a smaller
    share for vLLM, of whose KV cache at least half stays. Where these are not enough a phase exceeds the die.
    """
    schedule, stays, setting = _own_order(config, model, rows)
    inventory, (train, rollout) = _inventory(model, VLLM_DTYPES[config.recipe.dtype]), _layouts(config)
    step = simulated(schedule, inventory, train, rollout, setting, stays)
    choices = {} if setting.passes is None else _choices(config, model, train)
    found, phases = {}, []
    for phase in schedule.phases:
        options = choices.get(phase.name, [({}, {})])
        peak = functools.partial(_peak, phase.name, step, inventory, train, setting, options)
        place = _first(peak, len(options))
        found |= options[place][0]
        phases.append(peak(place))
    cached = [peak for peak in phases if "kv_cache" in peak["bytes"]]
    over = max((peak["peak_bytes"] - A3_SEEN_BYTES for peak in cached), default=0)
    if 0 < 2 * over <= min(peak["bytes"]["kv_cache"] for peak in cached):
        smaller, share = config.copy(), setting.kv_share - math.ceil(100 * over / A3_SEEN_BYTES) / 100
        found["actor_rollout_ref.rollout.gpu_memory_utilization"] = round(share, 2)
        smaller.actor_rollout_ref.rollout.gpu_memory_utilization = round(share, 2)
        return found, settings_that_fit(smaller, model, rows)[1]
    return found, phases


def _peak(
    phase: str,
    step: Collection[Alike],
    inventory: Inventory,
    train: ParallelLayout,
    setting: Setting,
    options: Sequence[tuple[dict[str, Any], dict[str, int]]],
    place: int,
) -> dict[str, Any]:
    """`phase_peak` with the option at `place`."""
    changes = options[place][1]
    passes = replace(setting.passes, **changes) if changes else setting.passes
    return phase_peak(phase, step, inventory, train, replace(setting, passes=passes))


def _first(peak: Callable[[int], dict[str, Any]], number: int) -> int:
    """The first of `number` places whose peak a die holds, else the last; from place 1 on peaks only fall."""

    def fits(place: int) -> bool:
        return peak(place)["peak_bytes"] <= A3_SEEN_BYTES

    if fits(0):
        return 0
    return bisect.bisect_left(range(number), True, lo=1, key=fits) if fits(number - 1) else number - 1


def _choices(
    config: DictConfig, model: ModelShape, train: ParallelLayout
) -> dict[str, list[tuple[dict[str, Any], dict[str, int]]]]:
    """{phase: [(keys, what they change in `Passes`)]}, the fastest first."""
    longest = config.data.max_prompt_length + config.data.max_response_length
    layers = max(len(train.stage_layers(stage, model.num_hidden_layers)) for stage in range(train.pp))
    found = {
        "update": [
            (recompute_keys(number), {"recompute_layers": number, "recompute_together": 1})
            for number in range(layers + 1)
        ]
    }
    for phase, side, tokens in (("ref", "ref", "ref_tokens"), ("old_log_prob", "rollout", "log_prob_tokens")):
        key = f"actor_rollout_ref.{side}.log_prob_micro_batch_size_per_gpu"
        given = OmegaConf.select(config, key) or 1
        halves = [given >> n for n in range(given.bit_length())]
        found[phase] = [({key: size}, {tokens: size * longest}) for size in halves]
    return found


def recompute_keys(layers: int) -> dict[str, Any]:
    """The keys that recompute the first `layers` layers of each stage."""
    checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing"
    if layers == 0:
        return {checkpointing: False}
    kwargs = {"granularity": "full", "method": "block", "num_layers": layers}
    prefix = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_"
    return {checkpointing: True, **{prefix + name: value for name, value in kwargs.items()}}


def too_much(plan: dict[str, Any]) -> list[str]:
    """`exceeding` of the followed order of a `memory_plan`."""
    (order,) = (order for order in plan["orders"] if order["order"] == plan["followed"])
    return [] if plan["hbm_bytes"] is None else exceeding(order["phases"])


def exceeding(phases: Iterable[dict[str, Any]]) -> list[str]:
    """Of phases that a die does not hold: one sentence for those of one die with the same largest terms.

    It says what the die needs, of what, for what.
    """
    short = [phase for phase in phases if phase["peak_bytes"] > A3_SEEN_BYTES]
    alike: dict[tuple, list[dict[str, Any]]] = {}  # such as wake_kv and rollout
    for phase in short:
        largest = tuple(sorted(phase["bytes"], key=phase["bytes"].get, reverse=True)[:3])
        alike.setdefault((phase["rank"], largest), []).append(phase)
    said = []
    for (rank, largest), phases in alike.items():
        phase = max(phases, key=lambda each: each["peak_bytes"])
        terms = ", ".join(f"{term} {phase['bytes'][term] / 1e9:.2f}" for term in largest)
        names = ", ".join(each["phase"] for each in phases)
        need = f"{phase['peak_bytes'] / 1e9:.2f} GB of {A3_SEEN_BYTES / 1e9:.2f}"
        said.append(f"{names}: die {rank} needs {need}; largest: {terms}")
    return said


@functools.lru_cache(maxsize=2)
def _inventory(model: ModelShape, dtype: str) -> Inventory:
    """Cached because a search plans the same model many times."""
    return build_inventory(replace(model, torch_dtype=dtype))


def _layouts(config: DictConfig) -> tuple[ParallelLayout, ParallelLayout]:
    return train_layout_of(config), rollout_layout_of(config)


def _not_modelled(setting: Setting, npu: bool, graphs: int) -> list[str]:
    found = ["fragmentation of torch's pool", "Ray's object store and the processes on the host"]
    if setting.passes is None:
        found.append("activations (line a3 only)")
    if npu:
        found.append(f"{graphs} captured graphs of the rollout engine (its activations: in gpu_memory_utilization)")
    else:
        found.append("the KV cache, HCCL's buffers and CANN's context (platform npu only)")
    return found


def _switches(config: DictConfig, rows: Collection[str]) -> tuple[dict[str, bool], bool]:
    recipe = config.recipe
    synced = recipe.weight_sync.enabled and direct_sync(rows)
    vllm_sleep = sleeps_by_vllm(config.actor_rollout_ref.rollout, recipe)
    return switches_of(rows, vllm_sleep=vllm_sleep, synced=synced), synced


def _followed(config: DictConfig, rows: Collection[str]) -> Schedule:
    skip = config.recipe.train.skip_old_log_prob
    if "memory.order" in rows:
        return schedule_followed(skip_old_log_prob=skip, **_switches(config, rows)[0])
    schedule = VERL[config.recipe.line]
    return schedule.without("old_log_prob") if skip else schedule


def _stays(config: DictConfig, rows: Collection[str]) -> frozenset[str]:
    actor, ref = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.ref.megatron
    switches, synced = _switches(config, rows)
    return staying(
        param_offload=actor.param_offload,
        optimizer_offload=actor.optimizer_offload or config.recipe.train.swap_optimizer,
        ref_offload=ref.param_offload,
        own_sleep_mode=switches["own_sleep_mode"],
        synced=synced,
    )


def _setting(
    config: DictConfig, inventory: Inventory, layouts: tuple[ParallelLayout, ParallelLayout], rows: Collection[str]
) -> Setting:
    recipe, rollout = config.recipe, config.actor_rollout_ref.rollout
    npu, replicas = recipe.platform == "npu", layouts[0].dp
    return Setting(
        train_library="mindspeed" if recipe.line == LINE else "megatron-local",
        rollout_library=rollout_library(config),
        bucket_bytes=recipe.reshard.bucket_bytes,
        swap_pieces=recipe.train.swap_optimizer_times if recipe.train.swap_optimizer else None,
        hbm_bytes=A3_SEEN_BYTES,
        kv_share=rollout.gpu_memory_utilization if npu else 0.0,
        tensor_cache_bytes=cached_bytes(config) // replicas if recipe.tensor_cache.enabled else 0,
        absorbed_copies=npu or recipe.line == LINE,  # MindSpeed's view on the CPU too
        passes=passes_of(config, replicas, rows) if recipe.line == LINE else None,
        hccl=hccl.buffer_bytes(config, inventory.model) if npu else None,
    )


def _communicators(config: DictConfig, model: ModelShape) -> list[dict[str, Any]]:
    return [
        {
            "side": group.side,
            "group": group.name,
            "ranks": group.ranks,
            "buffer_mib": hccl.group_buffer_mib(config, model, group),
        }
        for group in hccl.groups(config)
        if group.communicates
    ]


def passes_of(config: DictConfig, replicas: int, rows: Collection[str]) -> Passes:
    """Activations are those of the longest samples; micro batches of verl at this line are of a number of samples."""
    data, section, train = config.data, config.actor_rollout_ref, config.recipe.train
    longest, actor = data.max_prompt_length + data.max_response_length, section.actor
    kwargs, checkpointing = section.model.get("gradient_checkpointing_kwargs") or {}, {}
    for name in ("granularity", "method", "num_layers"):
        checkpointing[name] = kwargs.get(f"activations_checkpoint_{name}")
    full = section.model.enable_gradient_checkpointing and checkpointing["granularity"] == "full"
    number, uniform = checkpointing["num_layers"] or 1, checkpointing["method"] == "uniform"
    samples = actor.ppo_mini_batch_size * section.rollout.n // replicas
    size = actor.ppo_micro_batch_size_per_gpu or 1  # null is refused by another check
    return Passes(
        update_tokens=size * longest,
        log_prob_tokens=(section.rollout.log_prob_micro_batch_size_per_gpu or 1) * longest,
        ref_tokens=(section.ref.log_prob_micro_batch_size_per_gpu or 1) * longest,
        micro_batches=max(1, samples // size),
        recompute_layers=(10**6 if uniform else number) if full else 0,
        recompute_together=number if uniform else 1,
        imbalance=1.0 if train.balanced_routing else UNBALANCED,
        unpadded=train.unpadded_attention,
        entropy=bool(actor.entropy_coeff),
        chunked_logits={"logprob.in_chunks", "logprob.entropy_in_chunks"} <= set(rows),
        recorded_tokens=data.train_batch_size * section.rollout.n // replicas * longest if train.routing_replay else 0,
        fused_expert_wgrad=train.fused_expert_wgrad,
        fused_linear_wgrad=train.fused_linear_wgrad,
    )


def cached_bytes(config: DictConfig) -> int:
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


def pinned_bytes(config: DictConfig, model: ModelShape, rows: Collection[str]) -> int:
    """Bytes that the workers of the fullest node pin."""
    inventory, layouts = _inventory(model, VLLM_DTYPES[config.recipe.dtype]), _layouts(config)
    setting = _setting(config, inventory, layouts, rows)
    found = _host(config, inventory, layouts, setting, _followed(config, rows), _stays(config, rows))
    return found["node_bytes"]


def states_bytes(config: DictConfig, model: ModelShape, rows: Collection[str]) -> int:
    """Bytes of all memory groups of the fullest node, where dies are emulated or absent."""
    inventory, layouts = _inventory(model, VLLM_DTYPES[config.recipe.dtype]), _layouts(config)
    setting = _setting(config, inventory, layouts, rows)
    nodes = _of_nodes(config, layouts, lambda rank: group_bytes(inventory, *layouts, rank, setting))
    return max(sum(node.values()) for node in nodes)


def _of_nodes(
    config: DictConfig, layouts: tuple[ParallelLayout, ParallelLayout], of_rank: Callable[[int], dict[str, int]]
) -> list[dict[str, int]]:
    """{memory group: bytes} of each node, which has consecutive ranks; `of_rank` is called once for each stage."""
    dies, of_stage, nodes = config.trainer.n_gpus_per_node, {}, []
    for rank in range(layouts[0].world_size):
        stage = layouts[0].coordinates(rank).pp
        if stage not in of_stage:
            of_stage[stage] = of_rank(rank)
        if rank % dies == 0:
            nodes.append({})
        for group, size in of_stage[stage].items():
            nodes[-1][group] = nodes[-1].get(group, 0) + size
    return nodes


def _host(
    config: DictConfig,
    inventory: Inventory,
    layouts: tuple[ParallelLayout, ParallelLayout],
    setting: Setting,
    schedule: Schedule,
    stays: Collection[str],
) -> dict[str, Any]:
    """The node whose workers pin most. The parts of a host copy are equal within a stage."""
    whole, swapped = replace(setting, swap_pieces=None), setting.swap_pieces is not None
    saves = config.trainer.save_freq > 0

    def of_rank(rank: int) -> dict[str, int]:
        sizes = group_bytes(inventory, *layouts, rank, whole)
        return host_bytes(sizes, schedule, stays, swapped=swapped, saves=saves)

    nodes = _of_nodes(config, layouts, of_rank)
    fullest = max(nodes, key=lambda node: sum(node.values()))
    return {"bytes": fullest, "node_bytes": sum(fullest.values()), "limit_bytes": host_limit(config)}


def host_limit(config: DictConfig) -> int | None:
    """Bytes of a node's host memory: recipe.memory.host_gib, else this machine's where it has dies; else None."""
    given = config.recipe.memory.host_gib
    if given is not None:
        return given << 30
    here = config.recipe.platform == "npu" and any(DEVICES.glob("davinci[0-9]*"))
    return psutil.virtual_memory().total if here else None
