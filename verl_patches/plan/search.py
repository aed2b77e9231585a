"""Search layouts for a number of dies that pass an ordinary plan: the fastest come first.

On machines whose seconds are not modelled (`Hardware.timed` is false) those with the least traffic come first.
Training and rollout are enumerated apart, each with its cost: seconds of a step, or bytes that a die sends. Pairs are
planned in the order of their costs until enough of them pass, so that a row has the figures of its own plan. No torch.
"""

from __future__ import annotations

import bisect
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
from verl_patches.layout.parallel import ParallelLayout, rollout_layout
from verl_patches.plan import expected, memory_plan, plan, step_model
from verl_patches.plan.step_plan import Workload, step_input
from verl_patches.run import hccl
from verl_patches.run.engine_options import decode_graph_sizes
from verl_patches.run.resolve import MODEL_LAYERS_KEY, changed_run
from verl_patches.spec import A3, Rule, RunSpec

Sides = Iterator[tuple[float, dict[str, Any]]]  # (cost, keys) of each layout
ACTOR_KEY, REF_KEY, ROLLOUT_KEY = (f"actor_rollout_ref.{name}" for name in ("actor", "ref", "rollout"))
GRAPHS_KEY = "recipe.rollout.ascend.graph_batch_sizes"
_TP_SIZES, _MOST_STAGES, _MOST_SEQUENCES, _MOST_DIES = (1, 2, 4, 8, 16), 16, 128, 1024
PRESETS_TEXT = "presets: deepseekv3_16die has 8, deepseekv3_64die 32, with random weights"
# a search ends when so many pairs were tried, planned or passed; a smaller `top` ends none earlier: costs are not exact
_MOST_PAIRS, _MOST_PLANS, _FEWEST_RESULTS = 120, 60, 12


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
    a3, dies that do not fill nodes, and where nothing fits, which names the most layers that would.
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
    if not splits:
        experts = base.model.n_routed_experts
        raise ConfigError(f"--dies is {dies}: no number of ranks from 2 on divides both it and the {experts} experts")
    refusals = ["; ".join(hccl.mc2_faults(machine.mc2, base.model, ranks, tokens=1)) for ranks in splits]
    if hccl.decodes_by_mc2(base) and all(refusals):
        raise ConfigError(f"plan --search: {min(refusals, key=len)}")

    def list_layouts(tried: RunSpec, wanted: int) -> tuple[list[dict[str, Any]], Counter[str]]:
        return _list_layouts(tried, rules, workload, splits, given, wanted, advance)

    listed, refused = list_layouts(base, max(top, _FEWEST_RESULTS))
    if listed:
        return sorted(listed, key=lambda row: row["total_s"] or row["sent_bytes"])[:top]
    ((reason, _),) = refused.most_common(1)
    reason = reason.removeprefix("Invalid configuration: ")
    text = f"no layout for {dies} dies passes a plan; most are refused by {reason}"
    if "memory: " not in reason:
        raise ConfigError(text)

    def has_no_layout(layers: int) -> bool:
        return not list_layouts(changed_run(base, {MODEL_LAYERS_KEY: layers}), 1)[0]

    fewest = base.model.first_k_dense_replace + 1
    numbers = range(fewest, base.model.num_hidden_layers)
    if not (layers := [0, *numbers][bisect.bisect_left(numbers, True, key=has_no_layout)]):
        raise ConfigError(f"{text}; use more dies: the model's first {fewest} layers do not fit either")
    raise ConfigError(f"{text}; use more dies, or set {MODEL_LAYERS_KEY}={layers}, the most that fit ({PRESETS_TEXT})")


def _list_layouts(
    run: RunSpec,
    rules: Sequence[Rule],
    workload: Workload,
    splits: Sequence[int],
    given: dict[str, Any],
    wanted: int,
    advance: Callable[[int], Any],
) -> tuple[list[dict[str, Any]], Counter[str]]:
    """Return (rows of the first layouts that pass a plan, `wanted` at most; how often each reason refused one).

    Memory comes first: costs do not know that a weight sync holds both sides' weights, so that the cheapest pairs of a
    model that just fits are refused by it, and the rest of a plan takes most of the time.
    """
    listed, refused, step, planned = [], Counter[str](), step_input(run, workload), 0
    rollouts = list(_rollout_sides(run, step, splits, workload.constants))
    pairs = itertools.product(_train_sides(run, step, splits, workload.constants), rollouts)
    for train, rollout in heapq.nsmallest(_MOST_PAIRS, pairs, key=lambda pair: pair[0][0] + pair[1][0]):
        advance(1)
        keys = given | train[1] | rollout[1]
        try:
            tried = memory_plan.with_planned_keys(changed_run(run, memory_plan.recompute_keys("auto") | keys))
            peak_bytes = _fitting_peak(tried)
            planned += 1
            listed.append(_plan_candidate(tried, rules, workload, keys) | {"peak_bytes": peak_bytes})
        except ConfigError as error:
            refused[" ".join(str(error).split())] += 1
        if len(listed) == wanted or planned == _MOST_PLANS:
            break
    if not (listed or refused):
        side = (
            "training layout fits a die"
            if rollouts
            else "rollout layout fits a die, among those that the MC2 operator (if used) accepts"
        )
        refused[f"memory: no {side}"] += 1
    return listed, refused


def _train_sides(
    run: RunSpec, step: step_model.StepInput, splits: Sequence[int], constants: step_model.Constants
) -> Sides:
    """Yield (cost, keys) of training layouts with the fewest recomputed layers that leave MARGIN_BYTES of a die."""
    (setting, schedule, unmoved_groups), model = memory_plan.run_memory(run), step.model
    room = run.hardware.seen_bytes - memory_plan.MARGIN_BYTES
    most = max(splits, default=1)
    setting = replace(setting, rollout=rollout_layout(run.world_size // most, most, 1))  # any: updates do not read it
    given = setting.passes
    assert given is not None  # line a3 counts activations
    update = "update" if run.trains_actor else "update_critic"
    stages = range(1, min(_MOST_STAGES, model.num_hidden_layers - model.first_k_dense_replace) + 1)
    for tp, pp, ep in itertools.product(_TP_SIZES, stages, splits):
        batches, rest = divmod(step.responses * tp * pp, run.world_size * step.mini_batches * step.micro_batch)
        if run.world_size % (tp * pp) or run.world_size % (ep * pp) or ep % tp or rest:
            continue
        layers = tuple(balanced_layers(model, pp))
        layout = ParallelLayout(run.world_size, tp=tp, pp=pp, ep=ep, etp=1, layers_per_stage=layers)
        if 4 * max(sum(step_model.stage_elements(model, layout, stage, "mindspeed")) for stage in range(pp)) > room:
            continue  # gradients alone exceed a die
        passes = replace(given, micro_batches=batches)
        tried = replace(setting, train=layout, passes=passes)
        ranks = expected.simulate_ranks(schedule, tried, unmoved_groups)
        again = memory_plan.fewest_recomputed_layers(tried, ranks, room)
        tried = replace(tried, passes=replace(passes, recompute_layers=again))
        if expected.phase_peak(update, ranks, tried)["peak_bytes"] <= room:
            one = replace(step, train=layout, recompute_layers=again)
            cost = step_model.train_s(one, constants) if run.hardware.timed else step_model.train_bytes(one)
            yield cost, train_keys(tp, pp, ep, layers)


def _rollout_sides(
    run: RunSpec, step: step_model.StepInput, splits: Sequence[int], constants: step_model.Constants
) -> Sides:
    """Yield (cost, keys) of layouts, of any number of instances, whose weights leave room for the longest response.

    A run that does not split experts has instances of TP ranks alone.
    """
    machine, sizes, by_mc2 = run.hardware, run.recipe.rollout.ascend.graph_batch_sizes, hccl.decodes_by_mc2(run)
    splits_experts = run.recipe.rollout.enable_expert_parallel
    instances = itertools.product(_TP_SIZES, splits) if splits_experts else ((tp, tp) for tp in _TP_SIZES)
    for tp, ranks in instances:
        if run.world_size % ranks or ranks % tp:
            continue
        if by_mc2 and hccl.mc2_faults(machine.mc2, step.model, ranks, tokens=1):
            continue
        layout = rollout_layout(run.world_size // ranks, ranks // tp, tp, expert_parallel=splits_experts)
        seqs = min(math.ceil(step.responses / layout.dp), _MOST_SEQUENCES, step.token_budget)
        graphs = decode_graph_sizes(run.verl, seqs)
        keys = rollout_keys(tp, ranks) | {memory_plan.MAX_NUM_SEQS_KEY: seqs}
        if sizes is not None:
            keys[GRAPHS_KEY] = graphs = [*(size for size in sizes if size < seqs), seqs]
        one = replace(step, rollout=layout, max_num_seqs=seqs, graph_sizes=tuple(graphs) if step.graph_sizes else ())
        sync = step_model.direct_sync_bound(one.model, one, run.recipe.reshard.bucket_bytes)
        kv_bytes = memory_plan.engine_share(run, layout, step.token_budget, "train", "rollout") - sync.received_bytes
        one = replace(one, kv_bytes=kv_bytes)
        if kv_bytes >= run.longest_tokens * one.model.kv_bytes:
            seconds = step_model.rollout_s(one, constants) + step_model.reshard_s(sync, constants)
            yield seconds if machine.timed else step_model.rollout_bytes(one) + sync.received_bytes, keys


def _fitting_peak(run: RunSpec) -> int:
    """Return the peak bytes of a run's fullest die; raise ConfigError unless it leaves MARGIN_BYTES."""
    peaks, margin = memory_plan.followed_peaks(run), memory_plan.MARGIN_BYTES
    if short := memory_plan.memory_shortages(peaks["phases"], run.hardware.seen_bytes - margin):
        raise ConfigError(f"memory: modelled, with {margin / 1e9:g} GB left: {'; '.join(short)}")
    return peaks["peak_bytes"]


def _plan_candidate(run: RunSpec, rules: Sequence[Rule], workload: Workload, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one candidate, which `keys` made; raise ConfigError where its plan refuses it."""
    checks, figures = plan.plan_figures(run, (check for rule in rules for check in rule(run)), workload)
    require_checks(checks)
    layers, rollout, step = memory_plan.recomputation(run)[0], run.rollout, figures["step"] or {}
    host = figures["memory"]["host"]
    return {
        **{name: step.get(name) for name in ("total_s", "total_range_s", "tokens_per_s_per_die", "phases")},
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
