"""Layouts for a number of dies: those that are legal and fit, by modelled step time. No torch.

Candidates are pruned by estimates and sorted by modelled seconds. What is listed has also passed all checks and the
memory plan of an ordinary plan, in which the figures of its row were made.
"""

from __future__ import annotations

import bisect
import copy
import heapq
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.config.checks import check_config
from verl_patches.config.compose import vllm_arguments
from verl_patches.config.engine_options import rewrite_engine_options
from verl_patches.errors import ConfigError
from verl_patches.layout.flops import balanced_layers
from verl_patches.layout.inventory import DTYPE_BYTES, ModelShape
from verl_patches.layout.parallel import ParallelLayout, rollout_layout, train_layout_of
from verl_patches.layout.sharding import GRAD_BYTES, OPTIMIZER_BYTES
from verl_patches.planning.activations import Passes, update_bytes
from verl_patches.planning.calibration import FITTED
from verl_patches.planning.memory_plan import (
    MARGIN_BYTES,
    exceeding,
    host_limit,
    passes_of,
    pinned_bytes,
    recomputation,
    recompute_keys,
    settings_that_fit,
)
from verl_patches.planning.plan import engine_checks
from verl_patches.planning.step_model import (
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
from verl_patches.platform.npu.machine import HARDWARE

A3_SEEN_BYTES = HARDWARE["a3"].seen_bytes
DIES = range(16, 1025)
NODE_DIES = 16
RESERVE_BYTES = 8 << 30  # of a die, for HCCL's buffers, CANN's context and a swapped piece, in the estimates
ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron", "actor_rollout_ref.rollout"
MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
SEATS, GRAPHS = f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs", "recipe.rollout.ascend.graph_batch_sizes"
_TENSOR, _PIPELINE, _EXPERT = (f"{kind}_parallel_size" for kind in ("tensor_model", "pipeline_model", "expert_model"))
_BUFFERS_BYTES = 2 << 30  # of RESERVE_BYTES, what vLLM's share does not hold
_MOST_SEATS, _MOST_STAGES, _TP, _MICRO = 128, 16, (1, 2, 4, 8, 16), (1, 2, 4)
_TRIED = 60  # best candidates of which those to be listed are taken
_ALIKE = 8  # refused by the same check, and none that passes: the others would be too
_COMPARED = 4  # that pass a plan, at least, as the order of the estimates is not exact


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
        yield f"critic.megatron.{name}"
        yield f"reward_model.megatron.{name}"
    if section == "actor_rollout_ref.actor" and name.startswith("ppo_"):
        yield f"critic.{name}"
    if key == "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu":
        yield "reward_model.micro_batch_size_per_gpu"
    if key.startswith("actor_rollout_ref.model.") and "checkpoint" in key:
        yield key.replace("actor_rollout_ref.", "critic.")
    if key == "recipe.rollout.dp":
        yield f"{ROLLOUT}.engine_kwargs.vllm.data_parallel_size"


def as_overrides(updates: Mapping[str, Any]) -> list[str]:
    """Updates as words of a command line."""
    return [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in updates.items()]


class NoLayout(ConfigError):
    """No layout fits the dies; `dies`: the fewest on which one does, None where there is none, or another reason."""

    def __init__(self, text: str, dies: int | None = None):
        super().__init__(text)
        self.dies = dies


@dataclass(frozen=True)
class Side:
    """A candidate of one side: its keys, its modelled seconds, its bytes on the worst die in sync and in rollout."""

    updates: dict[str, Any]
    seconds: float
    sync_bytes: float
    rollout_bytes: float


def search(
    config: DictConfig, rows: Collection[str], dies: int, workload: Workload, top: int = 5
) -> list[dict[str, Any]]:
    """The `top` fastest legal layouts of the configuration's model and batch on `dies`, best first.

    [{total_s, tokens_per_s_per_die, train, rollout, micro_batch, recompute_layers, peak_bytes, update_bytes, phases,
    overrides}]. The configuration's own layout need not be legal. A batch that `dies` do not divide becomes the nearest
    one that they do, states of the optimizer go to the host where no layout holds them; `overrides` say so. Raises
    ConfigError for another platform than npu, dies that are no whole nodes, and where nothing fits: with the reason.
    """
    if dies not in DIES or dies % NODE_DIES:
        raise ConfigError(f"--dies is {dies}; expected a multiple of {NODE_DIES} from {DIES.start} to {DIES.stop - 1}")
    if config.recipe.hardware != "a3":
        raise ConfigError(
            "plan --search orders layouts by seconds, which no published run has for "
            f"{HARDWARE[config.recipe.hardware].title}: search with recipe.hardware=a3, then plan a row's overrides"
        )
    if config.recipe.platform != "npu" or config.recipe.train.expert_split != "tp_extend_ep":
        raise ConfigError(
            "plan --search models A3 dies with whole experts: expected recipe.platform=npu and "
            f"recipe.train.expert_split=tp_extend_ep, found {config.recipe.platform} and "
            f"{config.recipe.train.expert_split}; search with a config of the 256-die run or a preset"
        )
    listed, refused = _listed(config, rows, dies, workload, top)
    if not listed:
        raise _nothing_fits(config, rows, dies, workload, refused)
    return listed


def _listed(
    config: DictConfig, rows: Collection[str], dies: int, workload: Workload, top: int
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """(what `search` lists, how many layouts each reason has refused)."""
    given = _given(config, dies)
    pairs, refused = _best_pairs(config, rows, dies, workload, given), Counter()
    if not pairs and not config.recipe.train.swap_optimizer:
        given |= {"recipe.train.swap_optimizer": True}
        pairs = _best_pairs(config, rows, dies, workload, given)
    listed, causes = [], set()
    for updates in pairs:
        row = _verified(config, rows, {**given, **updates}, workload)
        if isinstance(row, str):
            refused[row] += 1
            causes.add(row.partition(":")[0])
        else:
            listed.append(row)
        same = not listed and len(causes) == 1 and causes != {"memory"} and refused.total() >= _ALIKE
        if same or len(listed) == max(top, _COMPARED):
            break
    return sorted(listed, key=lambda row: row["total_s"])[:top], refused


def _given(config: DictConfig, dies: int) -> dict[str, Any]:
    """Keys of every candidate: nodes, and where `dies` do not divide the batch the nearest that they do."""
    given = {"trainer.nnodes": dies // NODE_DIES, "trainer.n_gpus_per_node": NODE_DIES}
    batch, mini = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % dies:
        parts = max(1, round(batch / mini))
        unit = math.lcm(dies, parts)
        batch = unit * max(1, round(batch / unit))
        given |= {"data.train_batch_size": batch, MINI_BATCH: batch // parts}
    elif batch % mini:
        given |= {MINI_BATCH: batch}
    return given


def _best_pairs(
    config: DictConfig, rows: Collection[str], dies: int, workload: Workload, given: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Updates of at most _TRIED pairs of a training and a rollout side whose weights fit together, fastest first."""
    legal = train_keys(1, 1, 1, ()) | rollout_keys(1, 1) | recompute_keys(0)  # sides replace it
    base = changed(config, {**given, **legal, "recipe.train.layers_per_stage": None})
    run, passes = step_input(base, rows, workload), passes_of(base, 1, rows)
    trains, rollouts = train_sides(run, passes, dies), rollout_sides(base, run, dies)
    room = A3_SEEN_BYTES - _BUFFERS_BYTES
    sync_room = room - 4 * config.recipe.reshard.bucket_bytes
    pairs = (
        (train.seconds + rollout.seconds, number, {**train.updates, **rollout.updates})
        for number, (train, rollout) in enumerate((t, r) for t in trains for r in rollouts)
        if train.sync_bytes + rollout.sync_bytes <= sync_room and train.rollout_bytes + rollout.rollout_bytes <= room
    )
    return [updates for _, _, updates in heapq.nsmallest(_TRIED, pairs)]


def train_sides(run: StepInput, passes: Passes, dies: int) -> list[Side]:
    """Training layouts that split the model and the batch and fit a die, with the fewest recomputed layers."""
    model, sides = run.model, []
    for tp, pp, ep in train_sizes(model, dies):
        layers = balanced_layers(model, pp)
        if min(layers) == 0:
            continue
        layout = ParallelLayout(dies, tp=tp, pp=pp, ep=ep, etp=1, layers_per_stage=layers)
        if run.responses // run.mini_batches % layout.dp or run.prompts % dies:
            continue
        elements = [stage_elements(model, layout, stage, "mindspeed") for stage in range(pp)]
        params = DTYPE_BYTES[model.torch_dtype] * max(map(sum, elements))
        states = max(_states_bytes(run, layout, *each) for each in elements)
        share = run.responses // run.mini_batches // layout.dp
        fastest = None
        for micro in (size for size in _MICRO if share % size == 0):
            recomputed = _fewest_layers(run, layout, replace(passes, micro_batches=share // micro), micro)
            if recomputed is None:
                continue
            one = replace(run, train=layout, micro_batch=micro, recompute_layers=recomputed)
            copied = Offload(2 * params, params, params * (1 + GRAD_BYTES / 2), 2)
            seconds = update_s(one, FITTED) + offload_s(copied, FITTED)
            seconds += sum(log_prob_s(one, n, FITTED) for n in (run.ref_micro_batch, run.old_micro_batch) if n)
            if fastest is None or seconds < fastest.seconds:
                updates = train_keys(tp, pp, ep, layers)
                updates["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"] = micro
                fastest = Side(updates, seconds, params + states, states)
        sides += [fastest] if fastest else []
    return sides


def _states_bytes(run: StepInput, layout: ParallelLayout, dense: float, routed: float) -> float:
    """Bytes of the optimizer's states that stay on a rank with that many elements."""
    return 0 if run.swap_optimizer else OPTIMIZER_BYTES * (dense / layout.dp + routed / layout.edp)


def _fewest_layers(run: StepInput, layout: ParallelLayout, passes: Passes, micro: int) -> tuple[int, ...] | None:
    """Estimated layers of each stage that an update must recompute to fit; None if all are not enough."""
    model, size, found = run.model, DTYPE_BYTES[run.model.torch_dtype], []
    held, passes = model.n_routed_experts // layout.ep, replace(passes, update_tokens=micro * passes.update_tokens)
    for stage in range(layout.pp):
        dense, routed = stage_elements(model, layout, stage, "mindspeed")
        states = _states_bytes(run, layout, dense, routed)
        room = A3_SEEN_BYTES - MARGIN_BYTES - RESERVE_BYTES - states - (size + GRAD_BYTES) * (dense + routed)

        def fits(layers: int, stage: int = stage, room: float = room) -> bool:
            one = replace(passes, recompute_layers=layers, recompute_together=1)
            return sum(update_bytes(model, layout, stage, held, one).values()) <= room

        most = layout.layers_per_stage[stage]
        layers = 0 if fits(0) else bisect.bisect_left(range(most + 1), True, lo=1, key=fits)
        if layers > most:
            return None
        found.append(layers)
    return tuple(found)


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


def train_sizes(model: ModelShape, dies: int) -> Iterator[tuple[int, int, int]]:
    """(tp, pp, ep) whose dense and expert views are whole numbers of ranks."""
    for tp in (size for size in _TP if model.num_attention_heads % size == 0):
        for pp in range(1, min(_MOST_STAGES, model.num_hidden_layers - model.first_k_dense_replace) + 1):
            if dies % (tp * pp):
                continue
            yield from ((tp, pp, ep) for ep in expert_splits(model, dies // pp) if ep % tp == 0 and ep > 1)


def expert_splits(model: ModelShape, ranks: int) -> list[int]:
    """Numbers of ranks that divide both the routed experts and `ranks`."""
    return [n for n in range(1, ranks + 1) if ranks % n == 0 and model.n_routed_experts % n == 0]


def rollout_sides(config: DictConfig, run: StepInput, dies: int) -> list[Side]:
    """Rollout layouts whose weights and KV cache of at least one response a replica fit, in any order."""
    model, sides = run.model, []
    share = config.actor_rollout_ref.rollout.gpu_memory_utilization * A3_SEEN_BYTES
    longest = run.lengths.prompt + run.lengths.longest
    size = DTYPE_BYTES[model.torch_dtype]
    for tp in (n for n in _TP if model.num_attention_heads % n == 0 and dies % n == 0):
        for ranks in expert_splits(model, dies):
            if ranks % tp or ranks == 1:
                continue
            layout = rollout_layout(dies // ranks, ranks // tp, tp)
            dense, routed = stage_elements(model, layout, 0, run.rollout_library)
            weights = size * (dense + routed)
            kv = share - weights
            if kv < longest * model.kv_bytes:
                continue
            seats = min(math.ceil(run.responses / (dies // tp)), _MOST_SEATS, run.token_budget)
            of_seats = seats_keys(config, seats)
            graphs = tuple(of_seats.get(GRAPHS, (seats,))) if run.graph_sizes else ()
            one = replace(run, rollout=layout, seats=seats, graph_sizes=graphs, kv_bytes=kv)
            sync = direct_sync_bound(model, one, config.recipe.reshard.bucket_bytes)
            seconds = rollout_s(one, FITTED) + reshard_s(sync, FITTED)
            updates = rollout_keys(tp, ranks)
            if vllm_arguments(config).get("max_num_seqs") not in (None, seats):
                updates |= of_seats
            if (config.recipe.logprob_check.sequences or 0) % (dies // tp):
                updates["recipe.logprob_check.sequences"] = None  # one a replica
            sides.append(Side(updates, seconds, weights, weights + kv / 2))  # settings_that_fit keeps half
    return sides


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
) -> dict[str, Any] | str:
    """The row of one candidate; the reason, if a check of an ordinary plan fails or its memory does not fit."""
    tried = changed(config, {**recompute_keys(0), **updates})  # until `settings_that_fit` says how many layers
    try:
        checks = [*check_config(tried), *engine_checks(tried)]
        if failed := [f"{check.name}: {check.detail}" for check in checks if not check.ok]:
            return failed[0]
        fitting, phases = settings_that_fit(tried, rows)
    except ConfigError as error:
        return str(error)
    if short := exceeding(phases, A3_SEEN_BYTES):
        return f"memory: {'; '.join(short)}"
    limit = host_limit(tried)
    if limit is not None and pinned_bytes(tried, rows) > limit:
        return f"host memory: workers of a node pin more than its {limit >> 30} GiB"
    tried = changed(tried, fitting)
    step = step_sections(tried, rows, workload)["step"]
    train, rollout = train_layout_of(tried), tried.recipe.rollout
    tp = tried.actor_rollout_ref.rollout.tensor_model_parallel_size
    return {
        "total_s": step["total_s"],
        "tokens_per_s_per_die": step["tokens_per_s_per_die"],
        "train": str(train),
        "rollout": f"{train.world_size // (rollout.dp * tp)} x (DP{rollout.dp} TP{tp} EP{rollout.dp * tp})",
        "micro_batch": tried.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,
        "recompute_layers": recomputation(tried)[0],
        "peak_bytes": max(phase["peak_bytes"] for phase in phases),
        "update_bytes": next(phase["peak_bytes"] for phase in phases if phase["phase"] == "update"),
        "phases": step["phases"],
        "overrides": as_overrides(
            {key: value for key, value in {**updates, **fitting}.items() if OmegaConf.select(config, key) != value}
        ),
    }


def _nothing_fits(
    config: DictConfig, rows: Collection[str], dies: int, workload: Workload, refused: Counter[str]
) -> NoLayout:
    """Why no layout is listed: what refused most candidates, or the fewest dies on which one fits."""
    if refused:
        (reason, number), tried = refused.most_common(1)[0], refused.total()
        return NoLayout(f"none of {tried} layouts for {dies} dies passes a plan; {number} of them: {reason}")
    held = f"no layout of this model fits on {dies} dies of {A3_SEEN_BYTES >> 30} GiB, with {RESERVE_BYTES >> 30} GiB "
    held += "of each left for HCCL's buffers"
    for more in (n for n in (32, 64, 128, 256, 512, 1024) if n > dies):
        if _listed(config, rows, more, workload, 1)[0]:
            less = "take fewer layers (recipe.num_hidden_layers)"
            return NoLayout(f"{held}; --dies {more} fits, or {less}", more)
    return NoLayout(f"{held}, nor on 1024; take fewer layers (recipe.num_hidden_layers)")
