"""Bytes of each memory group of a rank, and the peak of every phase for any pair of layouts. No torch; modelled.

Weights, gradients and optimizer follow layout/sharding.py. Activations, HCCL's buffers and CANN's context are in no
memory group: they take what the peak leaves, in the rollout a part of the KV cache's share.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import DTYPE_BYTES, Inventory, build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import GRAD_BYTES, OPTIMIZER_BYTES, LocalParameters, local_parameters, static_bytes
from verl_patches.memory.schedule import Schedule, simulate

A3_DIE_BYTES = 64 << 30
# Megatron starts each parameter of a buffer at a multiple of 64 elements and ends it at one of 128 and dp
# (megatron/core/distributed/param_and_grad_buffer.py, _pad_start_of_param_if_needed, _pad_end_of_bucket_if_needed)
_PARAM_ALIGN, _BUFFER_ALIGN = 64, 128


@dataclass(frozen=True)
class Setting:
    """What decides the bytes besides model and layouts.

    `bucket_bytes`: recipe.reshard.bucket_bytes, four such buffers live in a weight sync; None: verl's own path.
    `swap_pieces`: recipe.train.swap_optimizer_times where the optimizer is swapped, None where it is not. `hbm_bytes`
    with `kv_share` (vLLM's gpu_memory_utilization) gives the KV cache, unless `kv_bytes` does. `tensor_cache_bytes`:
    what stages keep for each other. `absorbed_copies`: the engine keeps MLA's absorbed projections beside kv_b_proj, as
    large as that; vllm-ascend does (attention/mla_v1.py:669), and vLLM where MindSpeed makes torch.Tensor.view copy
    (mindspeed/megatron_adaptor.py:157); vLLM's own are views of it.
    """

    train_library: str = "mindspeed"
    rollout_library: str = "vllm"
    bucket_bytes: int | None = 512 << 20
    swap_pieces: int | None = None
    hbm_bytes: int = A3_DIE_BYTES
    kv_share: float = 0.0
    kv_bytes: int | None = None
    tensor_cache_bytes: int = 0
    absorbed_copies: bool = False


def in_dtype(inventory: Inventory, dtype: str) -> Inventory:
    """The same model trained and served in `dtype`; the correction bias stays fp32."""
    return build_inventory(replace(inventory.model, torch_dtype=dtype))


def group_bytes(
    inventory: Inventory, train: ParallelLayout, rollout: ParallelLayout, rank: int, setting: Setting
) -> dict[str, int]:
    """Bytes of each memory group of `rank` when it is on the device; the model's dtype is the inventory's.

    Without Megatron's alignment (`padding_bytes`). Trainable values only: the correction bias is a module's buffer
    that never moves. In fp32 the parameters are their own main copies, so Adam's two moments are all the optimizer has.
    """
    held = local_parameters(inventory, train, rank, setting.train_library)
    static = static_bytes(inventory, train, rank, setting.train_library)
    dtype = inventory.model.torch_dtype
    per_value = OPTIMIZER_BYTES - GRAD_BYTES * (dtype == "float32")
    optimizer = static.optimizer_bytes // OPTIMIZER_BYTES * per_value
    params = static.grad_bytes // GRAD_BYTES * DTYPE_BYTES[dtype]
    served = local_parameters(inventory, rollout, rank, setting.rollout_library)
    absorbed = [s for s in served.shards.values() if s.parameter.kind == "kv_b_proj" and setting.absorbed_copies]
    weights = served.size_bytes() + sum(s.count * DTYPE_BYTES[s.dtype] for s in absorbed)
    swapped = setting.swap_pieces is not None
    kv = setting.kv_bytes if setting.kv_bytes is not None else int(setting.kv_share * setting.hbm_bytes) - weights
    return {
        "actor_params": params,
        "grads": static.grad_bytes,
        "optimizer": 0 if swapped else optimizer,
        "swap_window": _window(held, train, setting, per_value) if swapped else 0,
        "ref_params": params,
        "rollout_weights": weights,
        "kv_cache": max(kv, 0),
        "tensor_cache": setting.tensor_cache_bytes,
        "reshard_buffers": _wire(setting.bucket_bytes, served.size_bytes(), rollout)
        if setting.bucket_bytes
        else (_gathered(inventory, train)),
    }


def _window(held: LocalParameters, train: ParallelLayout, setting: Setting, per_value: int) -> int:
    """Bytes that one swapped piece takes: the rank's share in `swap_pieces` parts, but never less than one tensor.

    MindSpeed's rule (mindspeed/core/optimizer/swap_optimizer.py, swap_adamw_step): pieces of whole tensors, one piece
    on the device at a time. It stacks all local experts of a layer into two tensors; gate and up are the larger.
    """
    largest, total, stacks = 0, 0, {}
    for shard in held.shards.values():
        parameter = shard.parameter
        if not parameter.trainable:
            continue
        share = -(-shard.count // (train.dp * train.cp if parameter.expert is None else train.edp))
        total += share
        if parameter.expert is not None and parameter.kind != "routed_expert_down":
            whole = setting.train_library == "mindspeed"
            key = parameter.layer, None if whole else parameter.expert
            stacks[key] = stacks.get(key, 0) + share
        largest = max(largest, share)
    return per_value * max(largest, max(stacks.values(), default=0), -(-total // setting.swap_pieces))


def _wire(bucket_bytes: int, weights: int, rollout: ParallelLayout) -> int:
    """At most: two buckets to receive into and two to send from (reshard/execute.py), of no more than there is."""
    return 2 * min(bucket_bytes, weights) + 2 * min(bucket_bytes, weights * (rollout.world_size - 1))


def _gathered(inventory: Inventory, train: ParallelLayout) -> int:
    """Bytes that verl's per_tensor_generator holds at once: the pieces of one tensor and what it joins them into.

    An expert's gate and up travel as one tensor, which every rank gathers from all EP ranks
    (verl/utils/megatron_utils.py:798); other tensors from the TP group (:828).
    """
    size = DTYPE_BYTES[inventory.model.torch_dtype]
    model = inventory.model
    experts = train.ep * 2 * model.moe_intermediate_size * model.hidden_size * size if train.ep > 1 else 0
    others = max(p.count for p in inventory.parameters if p.expert is None) * size
    return max(experts, 2 * others if train.tp > 1 else others)


def padding_bytes(inventory: Inventory, train: ParallelLayout, rank: int, library: str, bytes_per_value: int) -> int:
    """The most that Megatron's alignment adds to a buffer of `rank`: by so much may the ledger exceed the plan."""
    held = local_parameters(inventory, train, rank, library).shards.values()
    ends = 2 * _BUFFER_ALIGN * train.dp * train.cp
    return bytes_per_value * (ends + sum(-shard.count % _PARAM_ALIGN for shard in held if shard.parameter.trainable))


def peaks(
    schedule: Schedule,
    inventory: Inventory,
    train: ParallelLayout,
    rollout: ParallelLayout,
    setting: Setting,
    stays: Collection[str] = (),
) -> dict[str, Any]:
    """What a step of `schedule` takes at most, as plain data: per phase the worst rank, and the copies of a step.

    `phases`: [{phase, peak_bytes, rank, bytes: {memory group: bytes at the peak}}], with the lowest of equal ranks.
    `to_device_bytes`, `to_host_bytes`: of a step, {mean, max} over ranks; `empty_cache_calls` of a step. ConfigError as
    `local_parameters` and for a world size that differs.
    """
    if train.world_size != rollout.world_size:
        raise ConfigError(
            f"memory: training has {train.world_size} ranks, rollout {rollout.world_size}; "
            "both must be all ranks of the run"
        )
    alike = _alike(inventory, train, rollout)
    found = {}
    for ranks in alike:
        sizes = group_bytes(inventory, train, rollout, ranks[0], setting)
        found[ranks[0]] = sizes, simulate(schedule, sizes, stays)
    phases = []
    for phase in schedule.phases:
        rank = max(found, key=lambda r: (found[r][1][phase.name].peak_bytes, -r))
        sizes, moment = found[rank][0], found[rank][1][phase.name]
        there = {group: sizes[group] for group in sizes if group in moment.at_peak}
        phases.append({"phase": phase.name, "peak_bytes": moment.peak_bytes, "rank": rank, "bytes": there})
    counts = {ranks[0]: len(ranks) for ranks in alike}
    any_rank = next(iter(found.values()))[1]
    return {
        "order": schedule.name,
        "peak_bytes": max(p["peak_bytes"] for p in phases),
        "phases": phases,
        "to_device_bytes": _spread(found, counts, "to_device_bytes"),
        "to_host_bytes": _spread(found, counts, "to_host_bytes"),
        "empty_cache_calls": sum(moment.empty_cache_calls for moment in any_rank.values()),
    }


def _alike(inventory: Inventory, train: ParallelLayout, rollout: ParallelLayout) -> list[list[int]]:
    """Ranks that hold equally much: same stage in training and rollout, same number of rollout experts."""
    groups: dict[tuple, list[int]] = {}
    for rank in range(train.world_size):
        experts = rollout.local_experts(rank, inventory.model.n_routed_experts, rest_on_last=True)
        key = train.coordinates(rank).pp, rollout.coordinates(rank).pp, len(experts)
        groups.setdefault(key, []).append(rank)
    return list(groups.values())


def _spread(found: Mapping[int, tuple], counts: Mapping[int, int], name: str) -> dict[str, float]:
    sums = {rank: sum(getattr(moment, name) for moment in moments.values()) for rank, (_, moments) in found.items()}
    mean = sum(sums[rank] * count for rank, count in counts.items()) / sum(counts.values())
    return {"mean": round(mean), "max": max(sums.values())}
