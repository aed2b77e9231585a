"""Layouts for a number of dies: those that are legal and fit, by modelled step time. No torch.

Candidates are pruned by estimates and sorted by modelled seconds. What is listed has also passed all checks and the
memory plan of an ordinary plan, in which the figures of its row were made.
"""

from __future__ import annotations

import bisect
import heapq
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.config.resolve import change_config, changed, resolve
from verl_patches.errors import ConfigError
from verl_patches.layout.flops import balanced_layers
from verl_patches.layout.inventory import DTYPE_BYTES, ModelShape
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.layout.sharding import GRAD_BYTES, OPTIMIZER_BYTES
from verl_patches.patching.spec import PatchSpec
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
from verl_patches.spec import Rule, RunSpec, Trees

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
    run: RunSpec, rules: Sequence[Rule], dies: int, workload: Workload, top: int = 5, composed: DictConfig | None = None
) -> list[dict[str, Any]]:
    """Return the `top` fastest legal layouts of the run's model and batch on `dies`, best first.

    [{total_s, tokens_per_s_per_die, train, rollout, micro_batch, recompute_layers, peak_bytes, update_bytes, phases,
    overrides}]. rules: that each layout must keep. A batch that `dies` do not divide becomes the nearest one that they
    do, states of the optimizer go to the host where no layout holds them; `overrides` say so. composed: the
    configuration that the overrides go over, where `run` is `with_any_layout` of it. Raises ConfigError for another
    platform than npu, dies that are no whole nodes, and where nothing fits: with the reason.
    """
    if dies not in DIES or dies % NODE_DIES:
        raise ConfigError(f"--dies is {dies}; expected a multiple of {NODE_DIES} from {DIES.start} to {DIES.stop - 1}")
    if run.recipe.hardware != "a3":
        raise ConfigError(
            "plan --search orders layouts by seconds, which no published run has for "
            f"{run.hardware.title}: search with recipe.hardware=a3, then plan a row's overrides"
        )
    if run.recipe.platform != "npu" or run.recipe.train.expert_split != "tp_extend_ep":
        raise ConfigError(
            "plan --search models A3 dies with whole experts: expected recipe.platform=npu and "
            f"recipe.train.expert_split=tp_extend_ep, found {run.recipe.platform} and "
            f"{run.recipe.train.expert_split}; search with a config of the 256-die run or a preset"
        )
    wanted = _Search(run, rules, workload, run.verl if composed is None else composed)
    listed, refused = _listed(wanted, dies, top)
    if not listed:
        raise _nothing_fits(wanted, dies, refused)
    return listed


def with_any_layout(config: DictConfig, catalogue: Iterable[PatchSpec], trees: Trees) -> RunSpec:
    """Return the facts of a composed configuration whose ranks cannot be split as it says, with a layout that can."""
    legal = train_keys(1, 1, 1, ()) | rollout_keys(1, 1) | {"recipe.train.layers_per_stage": None}
    return resolve(change_config(config, legal), catalogue, trees=trees)


@dataclass(frozen=True)
class _Search:
    """What all candidates of a search share; its fields are those of `search`."""

    run: RunSpec
    rules: Sequence[Rule]
    workload: Workload
    composed: DictConfig


def _listed(wanted: _Search, dies: int, top: int) -> tuple[list[dict[str, Any]], Counter[str]]:
    """(what `search` lists, how many layouts each reason has refused)."""
    given = _given(wanted.run, dies)
    pairs, refused = _best_pairs(wanted, dies, given), Counter()
    if not pairs and not wanted.run.recipe.train.swap_optimizer:
        given |= {"recipe.train.swap_optimizer": True}
        pairs = _best_pairs(wanted, dies, given)
    listed, causes = [], set()
    for updates in pairs:
        row = _verified(wanted, {**given, **updates})
        if isinstance(row, str):
            refused[row] += 1
            causes.add(row.partition(":")[0])
        else:
            listed.append(row)
        same = not listed and len(causes) == 1 and causes != {"memory"} and refused.total() >= _ALIKE
        if same or len(listed) == max(top, _COMPARED):
            break
    return sorted(listed, key=lambda row: row["total_s"])[:top], refused


def _given(run: RunSpec, dies: int) -> dict[str, Any]:
    """Keys of every candidate: nodes, and where `dies` do not divide the batch the nearest that they do."""
    given = {"trainer.nnodes": dies // NODE_DIES, "trainer.n_gpus_per_node": NODE_DIES}
    batch, mini = run.verl.data.train_batch_size, run.verl.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % dies:
        parts = max(1, round(batch / mini))
        unit = math.lcm(dies, parts)
        batch = unit * max(1, round(batch / unit))
        given |= {"data.train_batch_size": batch, MINI_BATCH: batch // parts}
    elif batch % mini:
        given |= {MINI_BATCH: batch}
    return given


def _best_pairs(wanted: _Search, dies: int, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Updates of at most _TRIED pairs of a training and a rollout side whose weights fit together, fastest first."""
    legal = train_keys(1, 1, 1, ()) | rollout_keys(1, 1) | recompute_keys(0)  # sides replace it
    base = changed(wanted.run, {**given, **legal, "recipe.train.layers_per_stage": None})
    step, passes = step_input(base, wanted.workload), passes_of(base, 1)
    trains, rollouts = train_sides(step, passes, dies), rollout_sides(base, step, dies)
    room = A3_SEEN_BYTES - _BUFFERS_BYTES
    sync_room = room - 4 * base.recipe.reshard.bucket_bytes
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


def train_keys(tp: int, pp: int, ep: int, layers: Iterable[int]) -> dict[str, Any]:
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


def rollout_sides(run: RunSpec, step: StepInput, dies: int) -> list[Side]:
    """Rollout layouts whose weights and KV cache of at least one response a replica fit, in any order."""
    model, sides = step.model, []
    share = run.verl.actor_rollout_ref.rollout.gpu_memory_utilization * A3_SEEN_BYTES
    longest = step.lengths.prompt + step.lengths.longest
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
            seats = min(math.ceil(step.responses / (dies // tp)), _MOST_SEATS, step.token_budget)
            of_seats = seats_keys(run, seats)
            graphs = tuple(of_seats.get(GRAPHS, (seats,))) if step.graph_sizes else ()
            one = replace(step, rollout=layout, seats=seats, graph_sizes=graphs, kv_bytes=kv)
            sync = direct_sync_bound(model, one, run.recipe.reshard.bucket_bytes)
            seconds = rollout_s(one, FITTED) + reshard_s(sync, FITTED)
            updates = rollout_keys(tp, ranks)
            if run.engine.get("max_num_seqs") not in (None, seats):
                updates |= of_seats
            if (run.recipe.logprob_check.sequences or 0) % (dies // tp):
                updates["recipe.logprob_check.sequences"] = None  # one a replica
            sides.append(Side(updates, seconds, weights, weights + kv / 2))  # settings_that_fit keeps half
    return sides


def seats_keys(run: RunSpec, seats: int) -> dict[str, Any]:
    """The keys for `seats` requests at once: where the configuration lists sizes of graphs, those up to `seats`."""
    listed = run.recipe.rollout.ascend.graph_batch_sizes
    graphs = {} if listed is None else {GRAPHS: [*(size for size in listed if size < seats), seats]}
    return {SEATS: seats, **graphs}


def rollout_keys(tp: int, ranks: int) -> dict[str, Any]:
    """The keys that make instances of `ranks` ranks, as many as there are dies for."""
    return {f"{ROLLOUT}.{_TENSOR}": tp, "recipe.rollout.dp": ranks // tp, "recipe.rollout.instances": None}


def _verified(wanted: _Search, updates: Mapping[str, Any]) -> dict[str, Any] | str:
    """The row of one candidate; the reason, if a check of an ordinary plan fails or its memory does not fit."""
    try:
        tried = changed(wanted.run, {**recompute_keys(0), **updates})  # until `settings_that_fit` says how many layers
        for check in (check for rule in wanted.rules for check in rule(tried)):
            if not check.ok:
                return f"{check.name}: {check.detail}"
        fitting, phases = settings_that_fit(tried)
    except ConfigError as error:
        return str(error)
    if short := exceeding(phases, A3_SEEN_BYTES):
        return f"memory: {'; '.join(short)}"
    limit = host_limit(tried)
    if limit is not None and pinned_bytes(tried) > limit:
        return f"host memory: workers of a node pin more than its {limit >> 30} GiB"
    tried = changed(tried, fitting)
    step = step_sections(tried, wanted.workload)["step"]
    dp, tp = tried.recipe.rollout.dp, tried.rollout.tp
    chosen = {**updates, **fitting}
    return {
        "total_s": step["total_s"],
        "tokens_per_s_per_die": step["tokens_per_s_per_die"],
        "train": str(tried.train),
        "rollout": f"{tried.world_size // (dp * tp)} x (DP{dp} TP{tp} EP{dp * tp})",
        "micro_batch": tried.verl.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,
        "recompute_layers": recomputation(tried)[0],
        "peak_bytes": max(phase["peak_bytes"] for phase in phases),
        "update_bytes": next(phase["peak_bytes"] for phase in phases if phase["phase"] == "update"),
        "phases": step["phases"],
        "overrides": as_overrides(
            {key: value for key, value in chosen.items() if OmegaConf.select(wanted.composed, key) != value}
        ),
    }


def _nothing_fits(wanted: _Search, dies: int, refused: Counter[str]) -> NoLayout:
    """Why no layout is listed: what refused most candidates, or the fewest dies on which one fits."""
    if refused:
        (reason, number), tried = refused.most_common(1)[0], refused.total()
        return NoLayout(f"none of {tried} layouts for {dies} dies passes a plan; {number} of them: {reason}")
    held = f"no layout of this model fits on {dies} dies of {A3_SEEN_BYTES >> 30} GiB, with {RESERVE_BYTES >> 30} GiB "
    held += "of each left for HCCL's buffers"
    for more in (n for n in (32, 64, 128, 256, 512, 1024) if n > dies):
        if _listed(wanted, more, 1)[0]:
            less = "take fewer layers (recipe.num_hidden_layers)"
            return NoLayout(f"{held}; --dies {more} fits, or {less}", more)
    return NoLayout(f"{held}, nor on 1024; take fewer layers (recipe.num_hidden_layers)")
