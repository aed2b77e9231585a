"""Modelled memory outside the memory groups: activations, HCCL buffers, CANN context; host memory. No torch.

HCCL: a communicator exists from its group's first collective to the end of the process, so the buffers of all groups
that communicate are counted in every phase (config/hccl.py).

CANN: `CONTEXT_BYTES` is an assumption. Two out-of-memory messages of one-process runs on 64 GiB devices leave 0.55 and
0.89 GiB that are neither free nor torch's (zai-org/CogVideo issue 63, hiyouga/LlamaFactory issue 5491).

While the KV cache is on the device, the rollout's communicators and the context are inside vLLM's share: its profile
run takes from gpu_memory_utilization what a dummy batch needs at most, and all memory of the process that is not of
torch (vllm-ascend f20869ef, worker_v1.py, determine_available_memory). So activations of the rollout never come on
top. Graphs are captured after that; their memory is not modelled.
"""

from __future__ import annotations

from collections.abc import Collection

from verl_patches.layout.inventory import Inventory, ModelShape
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.memory.schedule import Schedule
from verl_patches.planning.activations import Passes, forward_bytes, update_bytes

CONTEXT_BYTES = 1 << 30


def always_bytes(hccl: dict[str, int], kv_cache: bool) -> dict[str, int]:
    """{term: bytes} that a rank has throughout a phase; hccl: bytes of the buffers of {train, rollout}."""
    if kv_cache:
        return {"hccl_buffers": hccl["train"]}
    return {"hccl_buffers": hccl["train"] + hccl["rollout"], "cann_context": CONTEXT_BYTES}


def work_bytes(inventory: Inventory, train: ParallelLayout, rank: int, phase: str, passes: Passes) -> dict[str, int]:
    """{term: bytes} of activations and recorded experts on `rank`; empty for phases without a pass of the model."""
    model, stage = inventory.model, train.coordinates(rank).pp
    if phase == "update":
        work = update_bytes(model, train, stage, len(train.local_experts(rank, model.n_routed_experts)), passes)
    elif phase == "old_log_prob":
        work = forward_bytes(model, train, stage, passes.log_prob_tokens, passes, entropy=True)
    elif phase == "ref":
        work = forward_bytes(model, train, stage, passes.ref_tokens, passes, entropy=False)
    else:
        return {}
    # by micro batch and, at the end of the pass that records, by sample too
    copies = 2 if phase == "old_log_prob" else 1
    return work | {"routing_record": copies * record_bytes(model, train, stage, passes.recorded_tokens)}


def record_bytes(model: ModelShape, train: ParallelLayout, stage: int, tokens: int) -> int:
    """Bytes of the routed experts of `tokens` in a stage's layers (replay/routing_replay.py).

    Each rank of a replica has all its tokens: context parallelism is refused.
    """
    layers = sum(model.is_moe(layer) for layer in train.stage_layers(stage, model.num_hidden_layers))
    one = 1 if model.n_routed_experts <= 256 else 2
    return tokens * layers * model.num_experts_per_tok * one


def host_bytes(
    sizes: dict[str, int], schedule: Schedule, stays: Collection[str], *, swapped: bool, saves: bool
) -> dict[str, int]:
    """{memory group: bytes} of pinned host memory of a rank.

    `sizes`: bytes of each group, `optimizer` whole. A group that is loaded has a host copy (gradients are allocated and
    freed, so they have none). `swapped`: the optimizer lives on the host. `saves`: checkpoints copy what never leaves
    the device into host memory that they keep (docs/checkpoints.md); the others are read where they are.
    """
    moves = [move for phase in schedule.phases for move in (*phase.enter, *phase.leave)]
    on_host = {move.group for move in moves if move.verb == "load"} - set(stays)
    if swapped:
        on_host.add("optimizer")
    groups = ("actor_params", "ref_params", "optimizer", "rollout_weights")
    found = {group: sizes[group] for group in groups if group in on_host}
    if saves:
        found["checkpoint"] = sum(sizes[group] for group in ("actor_params", "optimizer") if group not in on_host)
    return {group: size for group, size in found.items() if size}
