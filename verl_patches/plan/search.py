"""Search layouts for a number of dies that pass an ordinary plan: the fastest come first.

On machines whose seconds are not modelled (`Hardware.timed` is false) those with the least traffic come first.
Training and rollout are enumerated apart, each with its cost: seconds of a step, or bytes that a die sends. Pairs are
planned in the order of their costs until enough of them pass, so that a row has the figures of its own plan. No torch.
"""

from __future__ import annotations

import heapq
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from verl_patches.errors import ConfigError, require_checks
from verl_patches.layout.flops import balanced_layers
from verl_patches.layout.sharding import GRAD_BYTES
from verl_patches.plan import memory_plan, plan, step_model
from verl_patches.plan.step_plan import Workload, step_input
from verl_patches.run import hccl
from verl_patches.run.resolve import MODEL_LAYERS_KEY, changed_run
from verl_patches.spec import A3, Rule, RunSpec

Sides = Iterator[tuple[float, dict[str, Any]]]  # (cost, keys) of each layout
ACTOR_KEY, REF_KEY, ROLLOUT_KEY = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
GRAPHS_KEY = "recipe.rollout.ascend.graph_batch_sizes"
_TP_SIZES, _MOST_STAGES, _MOST_SEQUENCES, _MOST_DIES = (1, 2, 4, 8, 16), 16, 128, 1024
# a search ends when so many pairs were tried or passed; a smaller `top` ends none earlier: costs are not exact
_MOST_PAIRS, _FEWEST_RESULTS = 120, 12


def search(
    run: RunSpec,
    rules: Sequence[Rule],
    dies: int,
    workload: Workload,
    top: int = 5,
    advance: Callable[[int], Any] = lambda layouts: None,
) -> list[dict[str, Any]]:
    """Return the `top` best layouts of the run's model and batch on `dies` that keep `rules` and pass a plan.

    The best comes first; total_s, total_range_s, tokens_per_s_per_die and phases are None on machines without seconds.
    advance: called for each layout that is tried. Raises ConfigError for another platform than npu, another line than
    a3, dies that do not fill nodes, and where nothing fits.
    """
    machine = run.hardware
    if run.platform != "npu" or run.line != A3 or run.recipe.train.expert_split != "tp_extend_ep":
        needs = "recipe.platform=npu, recipe.line=a3 and recipe.train.expert_split=tp_extend_ep"
        found = f"{run.platform}, {run.line} and {run.recipe.train.expert_split}"
        raise ConfigError(f"plan --search: expected {needs}; found {found}")
    node = machine.usable_dies(run.verl.trainer.n_gpus_per_node)
    if dies % node or not node <= dies <= _MOST_DIES:
        raise ConfigError(f"--dies is {dies}; expected a multiple of {node} from {node} to {_MOST_DIES}")
    given: dict[str, Any] = {"trainer.nnodes": dies // node, "trainer.n_gpus_per_node": node}
    if run.recipe.hccl.expansion_mode not in machine.expansion_modes:
        given["recipe.hccl.expansion_mode"] = machine.expansion_modes[0]
    batch, mini = run.verl.data.train_batch_size, run.verl.actor_rollout_ref.actor.ppo_mini_batch_size
    if batch % dies:  # take the nearest batch that the dies divide
        steps = max(1, round(batch / mini))
        batch = math.lcm(dies, steps) * max(1, round(batch / math.lcm(dies, steps)))
        given |= {"data.train_batch_size": batch, f"{ACTOR_KEY}.ppo_mini_batch_size": batch // steps}
    base = changed_run(run, given | ANY_LAYOUT_KEYS)
    splits = [ranks for ranks in range(2, dies + 1) if not (dies % ranks or base.model.n_routed_experts % ranks)]
    refusals = ["; ".join(hccl.mc2_faults(machine.mc2, base.model, ranks, tokens=1)) for ranks in splits]
    if splits and hccl.decodes_by_mc2(base) and all(refusals):
        raise ConfigError(f"plan --search: {min(refusals, key=len)}")
    listed, refused, rollouts = [], Counter[str](), list(_rollout_sides(base, workload, splits))
    trains = list(_train_sides(changed_run(base, rollouts[0][1]), workload, splits)) if rollouts else []
    pairs = heapq.nsmallest(_MOST_PAIRS, itertools.product(trains, rollouts), lambda pair: pair[0][0] + pair[1][0])
    for train, rollout in pairs:
        advance(1)
        try:
            listed.append(_plan_candidate(base, rules, workload, given | train[1] | rollout[1]))
        except ConfigError as error:
            refused[" ".join(str(error).split()).removeprefix("Invalid configuration: ")] += 1
        if len(listed) == max(top, _FEWEST_RESULTS):
            break
    if listed:
        return sorted(listed, key=lambda row: row["total_s"] or row["sent_bytes"])[:top]
    reason = f"memory: no {'training' if rollouts else 'rollout'} layout fits a die"
    reason = refused.most_common(1)[0][0] if refused else reason
    todo = f"; use more dies, or fewer layers ({MODEL_LAYERS_KEY})" if "memory: " in reason else ""
    raise ConfigError(f"no layout for {dies} dies passes a plan; most are refused by {reason}{todo}")


def _train_sides(run: RunSpec, workload: Workload, splits: Sequence[int]) -> Sides:
    """Yield (cost, keys) of training layouts with the fewest recomputed layers that leave MARGIN_BYTES of a die."""
    model, step, timed = run.model, step_input(run, workload), run.hardware.timed
    room = run.hardware.seen_bytes - memory_plan.MARGIN_BYTES
    stages = range(1, min(_MOST_STAGES, model.num_hidden_layers - model.first_k_dense_replace) + 1)
    for tp, pp, ep in itertools.product(_TP_SIZES, stages, splits):
        rest = step.responses * tp * pp % (run.world_size * step.mini_batches * step.micro_batch)
        if run.world_size % (tp * pp) or run.world_size % (ep * pp) or ep % tp or rest:
            continue
        keys = train_keys(tp, pp, ep, balanced_layers(model, pp))
        tried = changed_run(run, keys | memory_plan.recompute_keys("auto"))
        stage_elements = (sum(step_model.stage_elements(model, tried.train, stage, "mindspeed")) for stage in range(pp))
        if GRAD_BYTES * max(stage_elements) > room:
            continue
        tried = memory_plan.with_recompute(tried)
        updates = [each for each in memory_plan.followed_peaks(tried)["phases"] if each["phase"].startswith("update")]
        if not memory_plan.memory_shortages(updates, room):
            one = step_input(tried, workload)
            yield step_model.train_s(one, workload.constants) if timed else step_model.train_bytes(one), keys


def _rollout_sides(run: RunSpec, workload: Workload, splits: Sequence[int]) -> Sides:
    """Yield (cost, keys) of layouts, of any number of instances, whose weights leave room for the longest response.

    A run that does not split experts has instances of TP ranks alone.
    """
    machine, sizes, by_mc2 = run.hardware, run.recipe.rollout.ascend.graph_batch_sizes, hccl.decodes_by_mc2(run)
    constants, rollout = workload.constants, run.verl.actor_rollout_ref.rollout
    instances = [(tp, tp) for tp in _TP_SIZES]
    if run.recipe.rollout.enable_expert_parallel:
        instances = list(itertools.product(_TP_SIZES, splits))
    for tp, ranks in instances:
        if run.world_size % ranks or ranks % tp:
            continue
        if by_mc2 and hccl.mc2_faults(machine.mc2, run.model, ranks, tokens=1):
            continue
        replicas = run.world_size // tp
        seqs = math.ceil(run.verl.data.train_batch_size * rollout.n / replicas)
        seqs = min(seqs, _MOST_SEQUENCES, rollout.max_num_batched_tokens)
        keys = rollout_keys(tp, ranks) | {memory_plan.MAX_NUM_SEQS_KEY: seqs}
        if sizes is not None:
            keys[GRAPHS_KEY] = [*(size for size in sizes if size < seqs), seqs]
        tried = changed_run(run, keys)
        one = step_input(tried, workload)
        sync = step_model.direct_sync_bound(one.model, one, run.recipe.reshard.bucket_bytes)
        share = memory_plan.engine_share(tried, tried.rollout, one.token_budget, "train", "rollout")
        one = replace(one, kv_bytes=(kv_bytes := share - sync.received_bytes))
        if kv_bytes >= run.longest_tokens * one.model.kv_bytes:
            seconds = step_model.rollout_s(one, constants) + step_model.reshard_s(sync, constants)
            yield seconds if machine.timed else step_model.rollout_bytes(one) + sync.received_bytes, keys


def _plan_candidate(run: RunSpec, rules: Sequence[Rule], workload: Workload, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the row of the candidate that `keys` make of a run.

    Raise ConfigError where its plan refuses it, or a die has less than MARGIN_BYTES left.
    """
    run = memory_plan.with_planned_keys(changed_run(run, memory_plan.recompute_keys("auto") | keys))
    peaks, margin = memory_plan.followed_peaks(run), memory_plan.MARGIN_BYTES
    # first, as the rest of a plan takes most of the time
    if short := memory_plan.memory_shortages(peaks["phases"], run.hardware.seen_bytes - margin):
        raise ConfigError(f"memory: modelled, with {margin / 1e9:g} GB left: {'; '.join(short)}")
    checks, figures = plan.plan_figures(run, (check for rule in rules for check in rule(run)), workload)
    require_checks(checks)
    layers, rollout, step = memory_plan.recomputation(run)[0], run.rollout, figures["step"] or {}
    host = figures["memory"]["host"]
    return {
        **{name: step.get(name) for name in ("total_s", "total_range_s", "tokens_per_s_per_die", "phases")},
        "peak_bytes": peaks["peak_bytes"],
        "sent_bytes": sum(figures["traffic"]["sent"].values()),
        "train": str(run.train),
        "rollout": f"{rollout.edp} x (DP{rollout.ep * rollout.etp // rollout.tp} TP{rollout.tp} EP{rollout.ep})",
        "recompute_layers": layers,
        "host": {name: host[name] for name in ("node_bytes", "limit_bytes")},
        "overrides": as_overrides(keys | memory_plan.recompute_keys(layers)),
    }


def as_overrides(keys: Mapping[str, Any]) -> list[str]:
    """Return keys with their values as words of a command line."""
    return [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in keys.items()]


def train_keys(tp: int, pp: int, ep: int, layers: Iterable[int] | None) -> dict[str, Any]:
    """Return the keys that give a training layout with whole experts on each rank."""
    sizes = {"tensor_model": tp, "pipeline_model": pp, "expert_model": ep}
    keys = {f"{ACTOR_KEY}.megatron.{name}_parallel_size": size for name, size in sizes.items()}
    keys |= {f"{side}.megatron.sequence_parallel": tp > 1 for side in (ACTOR_KEY, REF_KEY)}
    return keys | {"recipe.train.layers_per_stage": layers and list(layers)}


def rollout_keys(tp: int, ranks: int) -> dict[str, Any]:
    """Return the keys that give instances of `ranks` ranks, as many as there are dies for."""
    instances = {"recipe.rollout.data_parallel_size": ranks // tp, "recipe.rollout.instances": None}
    return {f"{ROLLOUT_KEY}.tensor_model_parallel_size": tp, **instances}


ANY_LAYOUT_KEYS = train_keys(1, 1, 1, None) | rollout_keys(1, 1) | memory_plan.recompute_keys(0)  # fits any rank count
