"""Modelled bytes of each memory group of a rank, and the peak of every phase, for any pair of layouts. No torch.

Weights, gradients and optimizer follow layout/sharding.py. What is beside the memory groups is counted where the
setting has it: activations by planning/activations.py, HCCL's buffers and CANN's context by planning/other_memory.py.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import DTYPE_BYTES, Inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import GRAD_BYTES, OPTIMIZER_BYTES, LocalParameters, local_parameters, static_bytes
from verl_patches.memory.schedule import Moment, Schedule, simulate
from verl_patches.planning.activations import Passes
from verl_patches.planning.other_memory import always_bytes, work_bytes

A3_DIE_BYTES = 64 << 30
# What a process sees of it (mem_get_info): the rest is the driver's. sgl-project/sglang issue 29838, on Atlas A3
A3_SEEN_BYTES = int(61.27 * (1 << 30))
# Megatron starts each parameter of a buffer at a multiple of 64 elements and ends it at one of 128 and dp
# (megatron/core/distributed/param_and_grad_buffer.py, _pad_start_of_param_if_needed, _pad_end_of_bucket_if_needed)
_PARAM_ALIGN, _BUFFER_ALIGN = 64, 128


@dataclass(frozen=True)
class Setting:
    """Settings that change the bytes, besides model and layouts.

    `bucket_bytes`: recipe.reshard.bucket_bytes, four such buffers exist in a weight sync; None: verl's own path.
    `swap_pieces`: recipe.train.swap_optimizer_times, None if the optimizer is not swapped. The KV cache is `kv_bytes`,
    or else follows from `hbm_bytes` and `kv_share` (vLLM's gpu_memory_utilization). `absorbed_copies`: the engine has
    copies of MLA's absorbed projections, as large as kv_b_proj: vllm-ascend (attention/mla_v1.py:669), and vLLM where
    MindSpeed makes torch.Tensor.view copy (mindspeed/megatron_adaptor.py:157); otherwise they are views of kv_b_proj.
    `passes`: None leaves activations out. `hccl`: {train, rollout} bytes of its buffers; None leaves out HCCL and CANN.
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
    passes: Passes | None = None
    hccl: dict[str, int] | None = None


def group_bytes(
    inventory: Inventory, train: ParallelLayout, rollout: ParallelLayout, rank: int, setting: Setting
) -> dict[str, int]:
    """Bytes of each memory group of `rank` while it is on the device; the model's dtype is the inventory's.

    Without Megatron's alignment (`padding_bytes`) and without the correction bias, a buffer that never moves. In fp32
    parameters have no main copies, so the optimizer has Adam's two moments only.
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
    if setting.bucket_bytes is None:
        buffers = _gathered(inventory, train)
    else:  # two buckets to receive into and two to send from (reshard/execute.py), at most the bytes that there are
        received, sent = served.size_bytes(), served.size_bytes() * (rollout.world_size - 1)
        buffers = 2 * min(setting.bucket_bytes, received) + 2 * min(setting.bucket_bytes, sent)
    return {
        "actor_params": params,
        "grads": static.grad_bytes,
        "optimizer": 0 if swapped else optimizer,
        "swap_window": _window(held, train, setting, per_value) if swapped else 0,
        "ref_params": params,
        "rollout_weights": weights,
        "kv_cache": max(kv, 0),
        "tensor_cache": setting.tensor_cache_bytes,
        "reshard_buffers": buffers,
    }


def _window(held: LocalParameters, train: ParallelLayout, setting: Setting, per_value: int) -> int:
    """Bytes of one swapped piece: the rank's share in `swap_pieces` parts, but at least one tensor.

    As mindspeed/core/optimizer/swap_optimizer.py, swap_adamw_step: a piece is whole tensors, and one piece at a time is
    on the device. MindSpeed stacks all local experts of a layer into two tensors, gate and up being the larger.
    """
    largest, total, stacks = 0, 0, {}
    for shard in held.shards.values():
        parameter = shard.parameter
        if not parameter.trainable:
            continue
        share = -(-shard.count // (train.dp * train.cp if parameter.expert is None else train.edp))
        total += share
        if parameter.expert is not None and parameter.kind != "routed_expert_down":
            stacked = setting.train_library == "mindspeed"
            key = parameter.layer, None if stacked else parameter.expert
            stacks[key] = stacks.get(key, 0) + share
        largest = max(largest, share)
    return per_value * max(largest, max(stacks.values(), default=0), -(-total // setting.swap_pieces))


def _gathered(inventory: Inventory, train: ParallelLayout) -> int:
    """Bytes that verl's per_tensor_generator holds at once: the pieces of one tensor and the joined tensor.

    Gate and up of an expert are one tensor, which every rank gathers from all EP ranks
    (verl/utils/megatron_utils.py:798); other tensors are gathered from the TP group (:828).
    """
    model, size = inventory.model, DTYPE_BYTES[inventory.model.torch_dtype]
    experts = train.ep * 2 * model.moe_intermediate_size * model.hidden_size * size if train.ep > 1 else 0
    others = max(p.count for p in inventory.parameters if p.expert is None) * size
    return max(experts, 2 * others if train.tp > 1 else others)


def _at_peak(
    inventory: Inventory, train: ParallelLayout, rank: int, setting: Setting, sizes: dict[str, int], moment: Moment
) -> dict[str, int]:
    """{memory group or term: bytes} when `rank` has most in a phase: as it moves groups, or in its work."""
    moments = []
    passes = setting.passes
    work = {} if passes is None else work_bytes(inventory, train, rank, moment.phase, passes)
    for groups, terms in ((moment.at_peak, {}), (moment.resident, work)):
        held = {group: sizes[group] for group in sizes if group in groups} | {t: n for t, n in terms.items() if n}
        if setting.hccl is not None:
            held |= always_bytes(setting.hccl, kv_cache=bool(held.get("kv_cache")))
        moments.append(held)
    return max(moments, key=lambda held: sum(held.values()))


def padding_bytes(inventory: Inventory, train: ParallelLayout, rank: int, library: str, bytes_per_value: int) -> int:
    """Most bytes that Megatron's alignment adds to a buffer of `rank`, by which the ledger may exceed the plan."""
    held = local_parameters(inventory, train, rank, library).shards.values()
    ends = 2 * _BUFFER_ALIGN * train.dp * train.cp
    return bytes_per_value * (ends + sum(-shard.count % _PARAM_ALIGN for shard in held if shard.parameter.trainable))


@dataclass(frozen=True)
class Alike:
    """Ranks that hold equally many bytes: those of each memory group, and what a schedule does with them by phase."""

    ranks: list[int]
    sizes: dict[str, int]
    moments: dict[str, Moment]


def simulated(
    schedule: Schedule,
    inventory: Inventory,
    train: ParallelLayout,
    rollout: ParallelLayout,
    setting: Setting,
    stays: Collection[str] = (),
) -> list[Alike]:
    """A step of `schedule` on all ranks. ConfigError as `local_parameters`, and if the world sizes differ."""
    if train.world_size != rollout.world_size:
        raise ConfigError(
            f"memory: training has {train.world_size} ranks, rollout {rollout.world_size}; "
            "both must be all ranks of the run"
        )
    groups: dict[tuple, list[int]] = {}
    for rank in range(train.world_size):
        experts = rollout.local_experts(rank, inventory.model.n_routed_experts, rest_on_last=True)
        key = train.coordinates(rank).pp, rollout.coordinates(rank).pp, len(experts)
        groups.setdefault(key, []).append(rank)
    found = []
    for ranks in groups.values():
        sizes = group_bytes(inventory, train, rollout, ranks[0], setting)
        found.append(Alike(ranks, sizes, simulate(schedule, sizes, stays)))
    return found


def phase_peak(
    phase: str, step: Collection[Alike], inventory: Inventory, train: ParallelLayout, setting: Setting
) -> dict[str, Any]:
    """{phase, peak_bytes, rank, bytes: {memory group or term: bytes at the peak}} of the worst rank, the lowest."""
    held = {
        each.ranks[0]: _at_peak(inventory, train, each.ranks[0], setting, each.sizes, each.moments[phase])
        for each in step
    }
    rank = max(held, key=lambda r: (sum(held[r].values()), -r))
    return {"phase": phase, "peak_bytes": sum(held[rank].values()), "rank": rank, "bytes": held[rank]}


def peaks(
    schedule: Schedule,
    inventory: Inventory,
    train: ParallelLayout,
    rollout: ParallelLayout,
    setting: Setting,
    stays: Collection[str] = (),
) -> dict[str, Any]:
    """Peak memory of a step of `schedule` as plain data: `phase_peak` of each phase, and the copied bytes.

    `to_device_bytes`, `to_host_bytes` of a step: {mean, max} over ranks. ConfigError as `simulated`.
    """
    step = simulated(schedule, inventory, train, rollout, setting, stays)
    phases = [phase_peak(phase.name, step, inventory, train, setting) for phase in schedule.phases]

    def mean_and_max(name: str) -> dict[str, int]:
        sums = [sum(getattr(moment, name) for moment in each.moments.values()) for each in step]
        total = sum(size * len(each.ranks) for size, each in zip(sums, step, strict=True))
        return {"mean": round(total / train.world_size), "max": max(sums)}

    return {
        "order": schedule.name,
        "peak_bytes": max(p["peak_bytes"] for p in phases),
        "phases": phases,
        "to_device_bytes": mean_and_max("to_device_bytes"),
        "to_host_bytes": mean_and_max("to_host_bytes"),
        "empty_cache_calls": sum(moment.empty_cache_calls for moment in step[0].moments.values()),
    }
