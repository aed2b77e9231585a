"""Layouts for a number of dies: those that are legal and fit, by modelled step time. No torch.

Candidates are pruned by estimates and sorted by modelled seconds. What is listed has also passed all checks and the
memory plan of an ordinary plan, in which the figures of its row were made.
"""

from __future__ import annotations

import copy
import heapq
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.config.checks import check_config
from verl_patches.config.compose import model_shape_of, vllm_arguments
from verl_patches.config.engine_options import rewrite_engine_options
from verl_patches.errors import ConfigError
from verl_patches.layout.flops import layer_sizes
from verl_patches.layout.inventory import DTYPE_BYTES, ModelShape
from verl_patches.layout.parallel import ParallelLayout, rollout_layout, train_layout_of
from verl_patches.layout.sharding import GRAD_BYTES, OPTIMIZER_BYTES
from verl_patches.memory.expected import A3_SEEN_BYTES
from verl_patches.planning.calibration import FITTED
from verl_patches.planning.memory_plan import followed_peaks, host_is_short, memory_plan
from verl_patches.planning.plan import engine_checks
from verl_patches.planning.step_model import (
    Hardware,
    Offload,
    StepInput,
    direct_sync_bound,
    log_prob_s,
    offload_s,
    reshard_s,
    rollout_s,
    stage_elements,
    update_s,
)
from verl_patches.planning.step_plan import Workload, step_input, step_sections

DIES = range(16, 1025)
NODE_DIES = 16
# of a die, for activations, HCCL's buffers and CANN's context, which only the memory plan counts. For pruning
RESERVE_BYTES = 10 << 30
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron", "actor_rollout_ref.rollout"
RECOMPUTED = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_num_layers"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
SEATS, GRAPHS = f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs", "recipe.rollout.ascend.graph_batch_sizes"
_TENSOR, _PIPELINE, _EXPERT = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model"))
_MOST_SEATS, _MOST_STAGES, _TP, _MICRO = 128, 16, (1, 2, 4, 8, 16), (1, 2, 4)
_TRIED = 200  # best candidates of which those to be listed are taken


def changed(config: DictConfig, updates: Mapping[str, Any]) -> DictConfig:
    """`config` with other values, as if it had been composed with them: what follows from a key changes with it."""
    config = copy.deepcopy(config)
    for key, value in updates.items():
        for name in (key, *_followers(key)):
            OmegaConf.update(config, name, value, force_add=True)
    rewrite_engine_options(config)
    return config


def _followers(key: str) -> Iterator[str]:
    """Keys that the configs set from `key`."""
    if key.startswith("recipe."):
        yield f"actor_rollout_ref.{key}"
    section, _, name = key.rpartition(".")
    if section == ACTOR and name.endswith("_parallel_size"):
        yield f"{REF}.{name}"
    if key == "recipe.rollout.dp":
        yield f"{ROLLOUT}.engine_kwargs.vllm.data_parallel_size"


def as_overrides(updates: Mapping[str, Any]) -> list[str]:
    """Updates as words of a command line."""
    return [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in updates.items()]


def balanced_layers(model: ModelShape, stages: int) -> list[int]:
    """Layers of each stage so that the slowest is as fast as can be; the head counts as layers of the last one."""
    active = layer_sizes(model, True, "vllm").active(model.num_experts_per_tok)
    loads = [0.0] * stages
    loads[-1] = model.vocab_size * model.hidden_size / active
    counts = [0] * stages
    for _ in range(model.num_hidden_layers):
        stage = min(range(stages), key=lambda s: (loads[s], s))
        loads[stage] += 1
        counts[stage] += 1
    return counts


@dataclass(frozen=True)
class Side:
    """A candidate of one side: the keys that make it, its modelled seconds, its bytes on the worst die."""

    updates: dict[str, Any]
    seconds: float
    params_bytes: float


def search(
    config: DictConfig, rows: Collection[str], dies: int, workload: Workload, top: int = 5
) -> list[dict[str, Any]]:
    """The `top` fastest legal layouts of the configuration's model and batch on `dies`, best first.

    [{total_s, tokens_per_s_per_die, train, rollout, micro_batch, peak_bytes, update_bytes, phases, overrides}]. Raises
    ConfigError for another platform than npu, dies that are no whole nodes, and where nothing fits: with a batch or a
    number of dies that does.
    """
    if dies not in DIES or dies % NODE_DIES:
        raise ConfigError(f"--dies is {dies}; expected a multiple of {NODE_DIES} from {DIES.start} to {DIES.stop - 1}")
    if config.recipe.platform != "npu" or config.recipe.train.expert_split != "tp_extend_ep":
        raise ConfigError(
            "plan --search models A3 dies with whole experts: expected recipe.platform=npu and "
            f"recipe.train.expert_split=tp_extend_ep, found {config.recipe.platform} and "
            f"{config.recipe.train.expert_split}; search with a config of the 256-die run or a preset"
        )
    if config.data.train_batch_size % dies:
        given = config.data.train_batch_size
        near = dies * max(1, round(given / dies))
        raise ConfigError(
            f"data.train_batch_size is {given}; expected a multiple of {dies} dies, as verl hands each an equal share "
            f"of the prompts: data.train_batch_size={near} {MINI_BATCH}={near}"
        )
    nodes = {"trainer.nnodes": dies // NODE_DIES, "trainer.n_gpus_per_node": NODE_DIES}
    run = step_input(config, rows, workload)
    listed = []
    for updates in _best_pairs(config, run, dies):
        row = _verified(config, rows, {**nodes, **updates}, workload)
        if row is not None:
            listed.append(row)
        if len(listed) == top:
            break
    if not listed:
        raise ConfigError(_nothing_fits(config, run, dies))
    return sorted(listed, key=lambda row: row["total_s"])


def _best_pairs(config: DictConfig, run: StepInput, dies: int) -> Iterator[dict[str, Any]]:
    """Updates of at most _TRIED pairs of a training and a rollout side whose weights fit together, fastest first."""
    trains, rollouts = train_sides(config, run, dies), rollout_sides(config, run, dies)
    room = A3_SEEN_BYTES - 4 * config.recipe.reshard.bucket_bytes
    pairs = (
        (train.seconds + rollout.seconds, number, {**train.updates, **rollout.updates})
        for number, (train, rollout) in enumerate((t, r) for t in trains for r in rollouts)
        if train.params_bytes + rollout.params_bytes <= room
    )
    yield from (updates for _, _, updates in heapq.nsmallest(_TRIED, pairs))


def train_sides(config: DictConfig, run: StepInput, dies: int) -> list[Side]:
    """Training layouts that split the model and the batch and fit a die without activations, in any order."""
    model, die, found = run.model, Hardware(), []
    all_layers = run.recompute_layers >= max(_layer_counts(config, model))
    for tp, pp, ep in train_sizes(model, dies):
        layers = balanced_layers(model, pp)
        if min(layers) == 0:
            continue
        layout = ParallelLayout(dies, tp=tp, pp=pp, ep=ep, etp=1, layers_per_stage=layers)
        if run.responses // run.mini_batches % layout.dp or run.prompts % dies:
            continue
        params = _fits_update(run, layout)
        if params is None:
            continue
        recomputed = max(layers) if all_layers else run.recompute_layers
        share = run.responses // run.mini_batches // layout.dp
        fastest = None
        for micro in (size for size in _MICRO if share % size == 0):
            one = replace(run, train=layout, micro_batch=micro, recompute_layers=recomputed)
            copied = Offload(2 * params, params, params * (1 + GRAD_BYTES / 2), 2)
            seconds = update_s(one, FITTED, die) + offload_s(copied, FITTED, die)
            seconds += sum(log_prob_s(one, n, FITTED, die) for n in (run.ref_micro_batch, run.old_micro_batch) if n)
            if fastest is None or seconds < fastest.seconds:
                fastest = Side(_train_updates(layout, micro, run, recomputed), seconds, params)
        found += [fastest] if fastest else []
    return found


def _train_updates(layout: ParallelLayout, micro: int, run: StepInput, recomputed: int) -> dict[str, Any]:
    updates = train_keys(layout.tp, layout.pp, layout.ep, layout.layers_per_stage)
    updates["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] = micro
    return updates | ({RECOMPUTED: recomputed} if recomputed != run.recompute_layers else {})


def train_keys(tp: int, pp: int, ep: int, layers: Collection[int]) -> dict[str, Any]:
    """The keys that make a training layout of whole experts."""
    return {
        f"{ACTOR}.{_TENSOR}": tp,
        f"{ACTOR}.{_PIPELINE}": pp,
        f"{ACTOR}.{_EXPERT}": ep,
        f"{ACTOR}.sequence_parallel": tp > 1,
        f"{REF}.sequence_parallel": tp > 1,
        "recipe.train.layers_per_stage": list(layers),
    }


def _layer_counts(config: DictConfig, model: ModelShape) -> list[int]:
    train = train_layout_of(config)
    return [len(train.stage_layers(stage, model.num_hidden_layers)) for stage in range(train.pp)]


def train_sizes(model: ModelShape, dies: int) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, ep) whose dense and expert views are whole numbers of ranks."""
    for tp in (size for size in _TP if model.num_attention_heads % size == 0):
        for pp in range(1, min(_MOST_STAGES, model.num_hidden_layers) + 1):
            if dies % (tp * pp):
                continue
            yield from ((tp, pp, ep) for ep in expert_splits(model, dies // pp) if ep % tp == 0 and ep > 1)


def expert_splits(model: ModelShape, ranks: int) -> list[int]:
    """Numbers of ranks that divide both the routed experts and `ranks`."""
    return [n for n in range(1, ranks + 1) if ranks % n == 0 and model.n_routed_experts % n == 0]


def _fits_update(run: StepInput, layout: ParallelLayout) -> float | None:
    """Bytes of the worst die's parameters, if it holds them, gradients and states beside the reserve; else None."""
    size, params, worst = DTYPE_BYTES[run.model.torch_dtype], 0.0, 0.0
    for stage in range(layout.pp):
        dense, routed = stage_elements(run.model, layout, stage, "mindspeed")
        states = 0 if run.swap_optimizer else OPTIMIZER_BYTES * (dense / layout.dp + routed / layout.edp)
        params = max(params, size * (dense + routed))
        worst = max(worst, (size + GRAD_BYTES) * (dense + routed) + states)
    return params if worst + RESERVE_BYTES <= A3_SEEN_BYTES else None


def rollout_sides(config: DictConfig, run: StepInput, dies: int) -> list[Side]:
    """Rollout layouts whose weights and KV cache of at least one response a replica fit, in any order."""
    model, die, found = run.model, Hardware(), []
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization * A3_SEEN_BYTES
    longest = run.lengths.prompt + run.lengths.longest
    size = DTYPE_BYTES[model.torch_dtype]
    token = (model.kv_lora_rank + model.qk_rope_head_dim) * size * model.num_hidden_layers
    for tp in (n for n in _TP if model.num_attention_heads % n == 0 and dies % n == 0):
        for ranks in expert_splits(model, dies):
            if ranks % tp or ranks == 1:
                continue
            layout = rollout_layout(dies // ranks, ranks // tp, tp)
            dense, routed = stage_elements(model, layout, 0, "vllm-ascend" if run.shared_whole else "vllm")
            weights = size * (dense + routed)
            kv = share - weights
            if kv < longest * token:
                continue
            seats = min(math.ceil(run.responses / (dies // tp)), _MOST_SEATS, run.token_budget)
            of_seats = seats_keys(config, seats)
            graphs = tuple(of_seats.get(GRAPHS, (seats,))) if run.graph_sizes else ()
            one = replace(run, rollout=layout, seats=seats, graph_sizes=graphs, kv_bytes=kv)
            sync = direct_sync_bound(model, one, config.recipe.reshard.bucket_bytes)
            seconds = rollout_s(one, FITTED, die) + reshard_s(sync, FITTED, die)
            updates = rollout_keys(tp, ranks)
            if vllm_arguments(config).get("max_num_seqs") not in (None, seats):
                updates |= of_seats
            found.append(Side(updates, seconds, weights))
    return found


def seats_keys(config: DictConfig, seats: int) -> dict[str, Any]:
    """The keys for `seats` requests at once: where the configuration lists sizes of graphs, those up to `seats`."""
    listed = config.recipe.rollout.ascend.graph_batch_sizes
    graphs = {} if listed is None else {GRAPHS: [*(size for size in listed if size < seats), seats]}
    return {SEATS: seats, **graphs}


def rollout_keys(tp: int, ranks: int) -> dict[str, Any]:
    """The keys that make instances of `ranks` ranks, as many as there are dies for."""
    return {f"{ROLLOUT}.{_TENSOR}": tp, "recipe.rollout.dp": ranks // tp, "recipe.rollout.instances": None}


def _verified(
    config: DictConfig, rows: Collection[str], updates: Mapping[str, Any], workload: Workload
) -> dict[str, Any] | None:
    """The row of one candidate; None if a check of an ordinary plan fails or its memory does not fit."""
    tried = changed(config, updates)
    if not all(check.ok for check in (*check_config(tried), *engine_checks(tried))):
        return None
    order, train = followed_peaks(tried, model_shape_of(tried), rows), train_layout_of(tried)
    if order["peak_bytes"] > A3_SEEN_BYTES:
        return None
    limited = tried.recipe.memory.host_gib is not None
    if limited and host_is_short(memory_plan(tried, model_shape_of(tried), rows)):
        return None
    step = step_sections(tried, rows, workload)["step"]
    rollout = tried.recipe.rollout
    tp = tried.actor_rollout_ref.rollout.tensor_model_parallel_size
    return {
        "total_s": step["total_s"],
        "tokens_per_s_per_die": step["tokens_per_s_per_die"],
        "train": str(train),
        "rollout": f"{train.world_size // (rollout.dp * tp)} x (DP{rollout.dp} TP{tp} EP{rollout.dp * tp})",
        "micro_batch": tried.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,
        "peak_bytes": order["peak_bytes"],
        "update_bytes": next(phase["peak_bytes"] for phase in order["phases"] if phase["phase"] == "update"),
        "phases": step["phases"],
        "overrides": as_overrides(updates),
    }


def _nothing_fits(config: DictConfig, run: StepInput, dies: int) -> str:
    """Why no layout fits, and the fewest dies on which one does."""
    for more in (n for n in (32, 64, 128, 256, 512, 1024) if n > dies):
        enlarged = replace(run, prompts=max(run.prompts, more))
        if next(_best_pairs(config, enlarged, more), None) is not None:
            return (
                f"no layout of this model fits on {dies} dies of {A3_SEEN_BYTES >> 30} GiB, with {RESERVE_BYTES >> 30} "
                f"GiB of each left for activations and buffers; --dies {more} fits, or take a model with fewer layers "
                "(recipe.model_shape, docs/plan.md)"
            )
    return f"no layout of this model fits on {dies} dies, nor on 1024; take a model with fewer layers"
