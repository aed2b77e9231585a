"""Modelled bytes beside the memory groups: activations by phase, HCCL's buffers, CANN's context; host memory. No torch.

HCCL: "each communicator occupies 2 x HCCL_BUFFSIZE" (CANN, HCCL_BUFFSIZE). A communicator exists from its first
collective to the end of the process, so all of them are counted in every phase; groups of one rank have none. Those of
training: Megatron core_r0.8.0's groups that MindSpeed-LLM's DeepSeek-V3 communicates over; point-to-point transfers of
the pipeline are batched in its own group (batch_p2p_comm). Those of the rollout: vLLM's coordinators.

CANN: `CONTEXT_BYTES` is an assumption. Two out-of-memory messages of one-process runs on 64 GiB devices leave 0.55 and
0.89 GiB that are neither free nor torch's (zai-org/CogVideo issue 63, hiyouga/LlamaFactory issue 5491).

While the KV cache is on the device, the rollout's communicators and the context are inside vLLM's share: its profile
run takes from gpu_memory_utilization what a dummy batch needs at most, and all memory of the process that is not of
torch (vllm-ascend f20869ef, worker_v1.py, determine_available_memory). So activations of the rollout never come on
top. Graphs are captured after that; their memory is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from verl_patches.layout.inventory import Inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.memory.activations import Passes, forward_bytes, update_bytes
from verl_patches.memory.schedule import Schedule

CONTEXT_BYTES = 1 << 30
BUFFERS_OF_A_COMMUNICATOR = 2
_MIB = 1 << 20

# (side, group) -> its size in ranks, of that side's layout
COMMUNICATORS: dict[tuple[str, str], Callable[[ParallelLayout], int]] = {
    ("train", "world"): lambda layout: layout.world_size,
    ("train", "tp"): lambda layout: layout.tp,
    ("train", "pp"): lambda layout: layout.pp,
    ("train", "dp-cp"): lambda layout: layout.dp * layout.cp,
    ("train", "tp-pp"): lambda layout: layout.tp * layout.pp,  # norm of the gradient
    ("train", "ep"): lambda layout: layout.ep * layout.etp,  # with TP where that extends EP
    ("train", "edp"): lambda layout: layout.edp,
    ("rollout", "world"): lambda layout: layout.world_size,
    ("rollout", "tp"): lambda layout: layout.tp,
    ("rollout", "dp"): lambda layout: layout.dp // layout.edp,
    ("rollout", "dp sync"): lambda layout: layout.dp // layout.edp,  # which ranks have requests (docs/ascend.md)
    ("rollout", "ep"): lambda layout: layout.ep * layout.etp,
}


def communicators(train: ParallelLayout, rollout: ParallelLayout) -> list[tuple[str, str, int]]:
    """(side, group, ranks) of each communicator that a rank has."""
    layouts = {"train": train, "rollout": rollout}
    sizes = ((side, group, size(layouts[side])) for (side, group), size in COMMUNICATORS.items())
    return [(side, group, ranks) for side, group, ranks in sizes if ranks > 1]


def buffer_bytes(
    train: ParallelLayout, rollout: ParallelLayout, buffer_mib: Callable[[str, str], int]
) -> dict[str, int]:
    """{train, rollout}: bytes of HCCL's buffers on a die; buffer_mib(side, group) is a group's HCCL_BUFFSIZE in MiB."""
    found = {"train": 0, "rollout": 0}
    for side, group, _ in communicators(train, rollout):
        found[side] += BUFFERS_OF_A_COMMUNICATOR * buffer_mib(side, group) * _MIB
    return found


def always_bytes(hccl: dict[str, int], kv_cache: bool) -> dict[str, int]:
    """{term: bytes} that a rank has throughout a phase, by `buffer_bytes` and whether the KV cache is there."""
    if kv_cache:
        return {"hccl_buffers": hccl["train"]}
    return {"hccl_buffers": hccl["train"] + hccl["rollout"], "cann_context": CONTEXT_BYTES}


def work_bytes(inventory: Inventory, train: ParallelLayout, rank: int, phase: str, passes: Passes) -> dict[str, int]:
    """{term: bytes} of the activations of a phase on `rank`; empty for phases without a pass of training's model."""
    model, stage = inventory.model, train.coordinates(rank).pp
    if phase == "update":
        return update_bytes(model, train, stage, len(train.local_experts(rank, model.n_routed_experts)), passes)
    if phase == "old_log_prob":
        return forward_bytes(model, train, stage, passes.log_prob_tokens, passes, entropy=True)
    if phase == "ref":
        return forward_bytes(model, train, stage, passes.ref_tokens, passes, entropy=False)
    return {}


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
