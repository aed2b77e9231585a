"""Model the bytes on a rank and its host, and the peak of every phase, for any pair of layouts; no torch.

Weights, gradients and optimizer follow layout/sharding.py, activations plan/activations.py.

HCCL: a communicator exists from its group's first collective to the end of the process, so the buffers of all groups
that communicate are counted in every phase (run/hccl.py).

CANN: `CONTEXT_BYTES` is an assumption. Two out-of-memory messages of one-process runs on 64 GiB devices leave 0.55 and
0.89 GiB that are neither free nor torch's (zai-org/CogVideo issue 63, hiyouga/LlamaFactory issue 5491).

The KV cache takes what vLLM's share of a die (gpu_memory_utilization) has left beside the weights, the most that a
dummy batch of the token budget needs, and all memory of the process that is not torch's: HCCL's buffers and the context
(vllm_ascend.worker.worker_v1.NPUWorker.determine_available_memory). All communicators are taken to exist by then, so
that the modelled cache is a lower bound; one that is made later leaves the cache its buffers and comes on top of the
share. Decode graphs are captured after that. torchair's executor keeps the memory of a graph's features to the end of
the process (ge.featureBaseRefreshable is 0 in the pinned torch_npu), so that it is counted in every phase.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import DTYPE_BYTES, Inventory, ModelShape, build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import GRAD_BYTES, OPTIMIZER_BYTES, local_parameters, static_bytes
from verl_patches.memory.schedule import ACTOR, CRITIC, PhaseMemory, Schedule, TrainedGroups, simulate
from verl_patches.plan.activations import Passes, forward_bytes, update_bytes

CONTEXT_BYTES = 1 << 30
_FROZEN_GROUPS = ("ref_params", "reward_params", "rollout_weights")  # memory groups of weights that are not trained
_VALUE_PHASES = ("rm_scores", "values", "update_critic")  # phases of value models


@dataclass(frozen=True)
class Setting:
    """Hold model, layouts and settings of a run, from which all bytes follow; the model's dtype is the inventory's.

    `bucket_bytes`: recipe.reshard.bucket_bytes, of which a weight sync has four buffers; None: verl's own path.
    `swap_pieces`: recipe.train.swap_optimizer_times, None if the optimizer is not swapped. `vllm_bytes`: vLLM's share
    of a die (gpu_memory_utilization), of which the KV cache takes what the weights leave. `absorbed_copies`: the engine
    has copies of MLA's absorbed projections, as large as kv_b_proj: vllm-ascend
    (vllm_ascend.attention.mla_v1.AscendMLAImpl.process_weights_after_loading), and vLLM where MindSpeed makes
    torch.Tensor.view copy (mindspeed.megatron_adaptor.torch_adaptation); otherwise they are views of kv_b_proj.
    `passes`: None leaves activations out. `hccl_bytes`: HCCL's buffers; None leaves out HCCL and CANN.
    `engine_activations`, `graph_bytes`: of the rollout engine's largest eager batch, and of its captured graphs.
    `critic`: whether a value model is trained too. `reward_models`: how many score. `sampled`: false on fixed data,
    which has no rollout engine. `actor`: false where the critic alone is trained.
    `reference`: whether a loss or the reward has the KL to a reference model.
    """

    inventory: Inventory
    train: ParallelLayout
    rollout: ParallelLayout
    train_library: str = "mindspeed"
    rollout_library: str = "vllm"
    bucket_bytes: int | None = 512 << 20
    swap_pieces: int | None = None
    vllm_bytes: int = 0
    tensor_cache_bytes: int = 0
    absorbed_copies: bool = False
    passes: Passes | None = None
    hccl_bytes: int | None = None
    engine_activations: int = 0
    graph_bytes: int = 0
    critic: bool = False
    reward_models: int = 0
    sampled: bool = True
    actor: bool = True
    reference: bool = True


def group_bytes(setting: Setting, rank: int) -> dict[str, int]:
    """Return the bytes that each memory group of `rank` has while the group is on the device.

    Megatron's alignment of its buffers is left out, and so is the correction bias, a buffer that never moves. In fp32
    parameters have no main copies, so that the optimizer has only Adam's two moments.
    """
    inventory, train, rollout = setting.inventory, setting.train, setting.rollout
    trained = _trained_bytes(setting, inventory, ACTOR, rank)
    weights, projections = served_bytes(inventory, rollout, rank, setting.rollout_library)
    if setting.bucket_bytes is None:
        buffers = _gathered_bytes(inventory, train)
    else:  # two buckets to receive into and two to send from (reshard/execute.py), at most all bytes
        buffers = 2 * min(setting.bucket_bytes, weights)
        buffers += 2 * min(setting.bucket_bytes, weights * (rollout.world_size - 1))
    weights += projections if setting.absorbed_copies else 0
    beside = sum(process_bytes(setting, kv_cache=True).values()) - setting.graph_bytes
    cache = max(setting.vllm_bytes - weights - beside, 0)
    if not setting.sampled:
        weights = cache = buffers = 0
    if not setting.actor:
        trained = dict.fromkeys(trained, 0)
    value = {}
    if setting.critic or setting.reward_models:
        value = _trained_bytes(setting, build_inventory(inventory.model, value=True), CRITIC, rank)
    if setting.critic:
        trained |= value
    return {
        **trained,
        "reward_params": value["critic_params"] if setting.reward_models else 0,
        "ref_params": trained["actor_params"] if setting.reference else 0,
        "rollout_weights": weights,
        "kv_cache": cache,
        "tensor_cache": setting.tensor_cache_bytes,
        "reshard_buffers": buffers,
    }


def served_bytes(inventory: Inventory, rollout: ParallelLayout, rank: int, library: str) -> tuple[int, int]:
    """Return (bytes of the weights that a rank of vLLM holds, those of kv_b_proj, which an engine may copy)."""
    served = local_parameters(inventory, rollout, rank, library)
    projections = [shard for shard in served.shards.values() if shard.parameter.kind == "kv_b_proj"]
    return served.size_bytes(), sum(shard.count * DTYPE_BYTES[shard.dtype] for shard in projections)


def _trained_bytes(setting: Setting, inventory: Inventory, groups: TrainedGroups, rank: int) -> dict[str, int]:
    """Return the bytes of the groups of one trained model."""
    static, dtype = static_bytes(inventory, setting.train, rank, setting.train_library), inventory.model.torch_dtype
    per_value, pieces = OPTIMIZER_BYTES, setting.swap_pieces
    if dtype == "float32":
        per_value -= GRAD_BYTES
    states = static.optimizer_bytes // OPTIMIZER_BYTES * per_value
    return {
        groups.params: static.grad_bytes // GRAD_BYTES * DTYPE_BYTES[dtype],
        groups.grads: static.grad_bytes,
        groups.optimizer: states if pieces is None else 0,
        groups.window: 0 if pieces is None else _window_bytes(setting, rank, per_value, pieces),
    }


def _window_bytes(setting: Setting, rank: int, per_value: int, pieces: int) -> int:
    """Return the bytes of one swapped piece: the rank's share in `pieces` parts, but at least one tensor.

    Pieces are those of mindspeed/core/optimizer/swap_optimizer.py, swap_adamw_step: whole tensors, one piece at a time
    on the device. MindSpeed stacks all local experts of a layer into two tensors, gate and up being the larger.
    """
    train, largest, total = setting.train, 0, 0
    stacks: dict[tuple[int | None, int | None], int] = {}  # by layer and, without MindSpeed, by expert
    for shard in local_parameters(setting.inventory, train, rank, setting.train_library).shards.values():
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
    return per_value * max(largest, max(stacks.values(), default=0), -(-total // pieces))


def _gathered_bytes(inventory: Inventory, train: ParallelLayout) -> int:
    """Return the bytes that verl's per_tensor_generator holds at once: the pieces of one tensor and the joined tensor.

    Gate and up of an expert are one tensor, which every rank gathers from all EP ranks; other tensors are gathered from
    the TP group (verl.utils.megatron_utils.per_tensor_generator).
    """
    model, size = inventory.model, DTYPE_BYTES[inventory.model.torch_dtype]
    experts = train.ep * 2 * model.moe_intermediate_size * model.hidden_size * size if train.ep > 1 else 0
    others = max(p.count for p in inventory.parameters if p.expert is None) * size
    return max(experts, 2 * others if train.tp > 1 else others)


def process_bytes(setting: Setting, kv_cache: bool) -> dict[str, int]:
    """Return {term: bytes} beside a rank's groups throughout a phase; with `kv_cache` the rollout's activations too."""
    if setting.hccl_bytes is None:
        return {}
    sizes = {"hccl_buffers": setting.hccl_bytes, "cann_context": CONTEXT_BYTES, "graphs": setting.graph_bytes}
    sizes["engine_activations"] = setting.engine_activations if kv_cache else 0
    return {term: size for term, size in sizes.items() if size}


def work_bytes(setting: Setting, rank: int, phase: str) -> dict[str, int]:
    """Return {term: bytes} of activations and recorded experts on `rank`; empty for phases without a model pass."""
    model, train, passes = setting.inventory.model, setting.train, setting.passes
    stage = train.coordinates(rank).pp
    if passes is None or phase not in ("update", "old_log_prob", "ref", *_VALUE_PHASES):
        return {}
    if phase in _VALUE_PHASES:
        if stage:  # a value head has one output; stage 0 keeps the embedding's weight gradient
            model = replace(model, vocab_size=1)
        passes = replace(passes, update_tokens=passes.critic_tokens, micro_batches=passes.critic_batches, entropy=False)
    if phase in ("update", "update_critic"):
        work = update_bytes(model, train, stage, len(train.local_experts(rank, model.n_routed_experts)), passes)
    elif phase == "old_log_prob":
        work = forward_bytes(model, train, stage, passes.log_prob_tokens, passes, entropy=True)
    else:
        tokens = {"ref": passes.ref_tokens, "values": passes.critic_tokens, "rm_scores": passes.reward_tokens}[phase]
        work = forward_bytes(model, train, stage, tokens, passes, entropy=False)
    # records are kept by micro batch and, at the end of the recording pass, by sample too
    copies = {"old_log_prob": 2, "rm_scores": 0}.get(phase, 1)  # rm_scores comes before the recording pass
    return work | {"routing_record": copies * record_bytes(model, train, stage, passes.recorded_tokens)}


def record_bytes(model: ModelShape, train: ParallelLayout, stage: int, tokens: int) -> int:
    """Return the bytes of the routed experts of `tokens` in a stage's layers (step/replay/routing_replay.py).

    Each rank of a replica has all of its tokens, as context parallelism is refused.
    """
    layers = sum(model.is_moe(layer) for layer in train.stage_layers(stage, model.num_hidden_layers))
    one = 1 if model.n_routed_experts <= 256 else 2
    return tokens * layers * model.num_experts_per_tok * one


@dataclass(frozen=True)
class RankGroup:
    """Describe `ranks` that hold equally many bytes: `sizes` of the memory groups, `moments` of a step's phases."""

    ranks: list[int]
    sizes: dict[str, int]
    moments: dict[str, PhaseMemory]


def simulate_ranks(schedule: Schedule, setting: Setting, unmoved_groups: Collection[str] = ()) -> list[RankGroup]:
    """Simulate a step of `schedule` on all ranks; ConfigError as `local_parameters`, or if world sizes differ."""
    train, rollout = setting.train, setting.rollout
    if train.world_size != rollout.world_size:
        raise ConfigError(
            f"memory: training has {train.world_size} ranks, rollout {rollout.world_size}; "
            "expected all ranks of the run in both"
        )
    rank_groups: dict[tuple, list[int]] = {}
    for rank in range(train.world_size):
        experts = rollout.local_experts(rank, setting.inventory.model.n_routed_experts, rest_on_last=True)
        key = train.coordinates(rank).pp, rollout.coordinates(rank).pp, len(experts)
        rank_groups.setdefault(key, []).append(rank)
    step = []
    for ranks in rank_groups.values():
        sizes = group_bytes(setting, ranks[0])
        step.append(RankGroup(ranks, sizes, phase_moments(schedule, setting, sizes, unmoved_groups)))
    return step


def phase_moments(
    schedule: Schedule, setting: Setting, sizes: dict[str, int], unmoved_groups: Collection[str]
) -> dict[str, PhaseMemory]:
    """Return the moments of `simulate`, with each reward model loaded in turn."""
    moments = simulate(schedule, sizes, unmoved_groups)
    if "rm_scores" in moments:
        moments["rm_scores"].to_device_bytes *= setting.reward_models
    return moments


def phase_peak(phase: str, step: Collection[RankGroup], setting: Setting) -> dict[str, Any]:
    """Return {phase, peak_bytes, rank, bytes: {group or term: bytes at the peak}} of the first rank with the most."""
    sizes = {each.ranks[0]: _peak_terms(phase, each, setting) for each in step}
    rank = max(sizes, key=lambda r: (sum(sizes[r].values()), -r))
    return {"phase": phase, "peak_bytes": sum(sizes[rank].values()), "rank": rank, "bytes": sizes[rank]}


def _peak_terms(phase: str, each: RankGroup, setting: Setting) -> dict[str, int]:
    """Return {memory group or term: bytes} at these ranks' peak of a phase: in its moves of groups, or in its work."""
    moment, moments = each.moments[phase], []
    for groups, terms in ((moment.at_peak, {}), (moment.resident, work_bytes(setting, each.ranks[0], phase))):
        sizes = {group: each.sizes[group] for group in each.sizes if group in groups}
        sizes |= {term: size for term, size in terms.items() if size}
        moments.append(sizes | process_bytes(setting, kv_cache=bool(sizes.get("kv_cache"))))
    return max(moments, key=lambda sizes: sum(sizes.values()))


def memory_peaks(schedule: Schedule, setting: Setting, unmoved_groups: Collection[str] = ()) -> dict[str, Any]:
    """Return the peak memory of a step of `schedule` as plain data: `phase_peak` of each phase, and the copied bytes.

    `to_device_bytes`, `to_host_bytes` of a step: {mean, max} over ranks. Raise ConfigError as in `simulate_ranks`.
    """
    step = simulate_ranks(schedule, setting, unmoved_groups)
    phases = [phase_peak(phase, step, setting) for phase in step[0].moments]

    def mean_and_max(name: str) -> dict[str, int]:
        sums = [sum(getattr(moment, name) for moment in each.moments.values()) for each in step]
        total = sum(size * len(each.ranks) for size, each in zip(sums, step, strict=True))
        return {"mean": round(total / setting.train.world_size), "max": max(sums)}

    return {
        "order": schedule.name,
        "peak_bytes": max(p["peak_bytes"] for p in phases),
        "phases": phases,
        "to_device_bytes": mean_and_max("to_device_bytes"),
        "to_host_bytes": mean_and_max("to_host_bytes"),
        "empty_cache_calls": sum(moment.empty_cache_calls for moment in step[0].moments.values()),
    }


def host_bytes(
    sizes: dict[str, int], schedule: Schedule, unmoved_groups: Collection[str], *, swapped: bool, saves: bool
) -> dict[str, int]:
    """Return {memory group: bytes} of pinned host memory of a rank.

    `sizes`: bytes of each group, `optimizer` whole. A group that is loaded has a host copy, but gradients have none, as
    they are allocated and freed. `swapped`: the optimizer lives on the host. `saves`: checkpoints copy groups that
    never leave the device into host memory that they keep (docs/operate.md), and read the others in place.
    """
    moves = [move for phase in schedule.phases for move in (*phase.enter, *phase.leave)]
    on_host = {move.group for move in moves if move.verb == "load"} - set(unmoved_groups)
    if swapped:
        on_host |= {ACTOR.optimizer, CRITIC.optimizer}
    saved = [group for each in (ACTOR, CRITIC) for group in (each.params, each.optimizer) if group in sizes]
    copies = {group: sizes[group] for group in (*saved, *_FROZEN_GROUPS) if group in on_host}
    if saves:
        copies["checkpoint"] = sum(sizes[group] for group in saved if group not in on_host)
    return {group: size for group, size in copies.items() if size}
