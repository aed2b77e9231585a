"""Plan a run's memory as plain data: the worst die of each phase, the fullest node, and the settings that fit a die.

All figures are modelled, in plan/expected.py and plan/activations.py.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil
from omegaconf import OmegaConf

from verl_patches.errors import Check, ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.memory.schedule import Schedule, schedule_for_run
from verl_patches.plan.activations import UNBALANCED_RATIO, Passes, PerStage, engine_bytes, graph_bytes
from verl_patches.plan.expected import (
    CONTEXT_BYTES,
    RankGroup,
    Setting,
    group_bytes,
    host_bytes,
    memory_peaks,
    phase_peak,
    simulate_ranks,
)
from verl_patches.platform import NO_DEVICE
from verl_patches.run import hccl
from verl_patches.run.files import recorded_bytes
from verl_patches.run.resolve import changed_run
from verl_patches.spec import A3, RunSpec

DEVICE_FOLDER = Path("/dev")
# Room of a die that is kept free where the plan chooses the recomputed layers of an update, for what it does not count
# (fragmentation of torch's pool, workspaces of kernels)
MARGIN_BYTES = 5 * 10**9
# Host memory of a worker's process beside what it pins: an estimate
WORKER_BYTES = 10 << 30
# Share of a node's memory beyond which Ray's memory monitor kills a worker (RAY_memory_usage_threshold)
MEMORY_MONITOR_SHARE = 0.95
_OBJECT_STORE_BYTES = 256 << 20  # least size on a CPU
_STORE_SHARE, _STORE_MAX_BYTES = 0.3, 200 * 10**9  # defaults of `ray start` in ray/_private/ray_constants.py
KV_BLOCK_TOKENS = 128  # vllm_ascend.platform.NPUPlatform.check_and_update_config
CHECKPOINTING_KEY = "actor_rollout_ref.model.enable_gradient_checkpointing"
MAX_NUM_SEQS_KEY = "actor_rollout_ref.rollout.engine_kwargs.vllm.max_num_seqs"
_KWARGS = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_"
LAYERS_KEY = f"{_KWARGS}num_layers"
# {phase: key of the samples of its micro batches}: what to lower where the logits or activations of a pass do not fit
_MICRO_BATCH_KEYS = {
    "ref": "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu",
    "old_log_prob": "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "rm_scores": "reward_model.micro_batch_size_per_gpu",
}


class RunMemory(NamedTuple):
    """Hold what a run's memory follows from: its sizes, its order of a step, and the memory groups that never move.

    `setting`: with buffers of verl's own weight sync where the run uses that.
    """

    setting: Setting
    schedule: Schedule
    unmoved_groups: frozenset[str]


def run_memory(run: RunSpec) -> RunMemory:
    """Return what the memory of a run follows from; raise ConfigError where sizes do not divide."""
    recipe, section = run.recipe, run.verl.actor_rollout_ref
    train, model, npu = run.train, run.trained_model, run.platform == "npu"
    samples = npu and run.samples
    graphs = samples and run.graphs
    inventory = build_inventory(model)
    setting = Setting(
        inventory,
        train,
        run.rollout,
        train_library=run.train_library,
        rollout_library=run.rollout_library,
        bucket_bytes=recipe.reshard.bucket_bytes if "reshard.direct" in run.rows else None,
        swap_pieces=recipe.train.swap_optimizer_times if recipe.train.swap_optimizer else None,
        vllm_bytes=int(section.rollout.gpu_memory_utilization * run.hardware.seen_bytes) if npu else 0,
        tensor_cache_bytes=cached_bytes(run) // train.dp if recipe.tensor_cache.enabled else 0,
        absorbed_copies=npu or run.line == A3,  # MindSpeed's torch.Tensor.view copies on the CPU too
        passes=run_passes(run, train.dp) if run.line == A3 else None,
        hccl_bytes=sum(hccl.buffer_bytes(run).values()) if npu else None,
        engine_activations=engine_bytes(model, run.rollout, section.rollout.max_num_batched_tokens) if samples else 0,
        graph_bytes=graph_bytes(model, run.rollout, run.graph_sizes or (run.max_num_seqs,)) if graphs else 0,
        critic=run.has_critic,
        reward_models=len(run.reward_models),
        sampled=run.samples,
        actor=run.trains_actor,
        reference=run.uses_reference,
    )
    return RunMemory(setting, *schedule_for_run(run, section, run.critic))


def memory_plan(run: RunSpec, memory: RunMemory) -> dict[str, Any]:
    """Return {modelled, hbm_bytes, swapped, recompute_layers, communicators, host, not_modelled} and `memory_peaks`.

    Bytes are those of the worst rank. `recompute_layers`: a number for all stages or a list of one for each, None where
    activations are not modelled. Activations are counted on line a3, HCCL's buffers and CANN's context on platform npu.
    `hbm_bytes` is the part of a die that a process sees, None on other platforms, where the KV cache is not modelled.
    `host`: `node_host_bytes` and limit_bytes (`host_limit`). Raise ConfigError where sizes do not divide.
    """
    npu, setting, limit = run.platform == "npu", memory.setting, host_limit(run)
    layers = None if setting.passes is None else setting.passes.recompute_layers
    communicators = [group for group in hccl.hccl_groups(run) if group.communicates] if npu else []
    parts = ["fragmentation of torch's pool", "workspaces of kernels, memory of a communicator beside its two buffers"]
    parts += [] if setting.passes else ["activations (line a3 only)"]
    parts += [] if npu else ["the KV cache, HCCL's buffers and CANN's context (platform npu only)"]
    return {
        "modelled": True,
        "hbm_bytes": run.hardware.seen_bytes if npu else None,
        **memory_peaks(memory.schedule, setting, memory.unmoved_groups),
        "swapped": run.recipe.train.swap_optimizer,
        "recompute_layers": layers if layers is None or isinstance(layers, int) else list(layers),
        "communicators": [
            {"side": each.side, "group": each.name, "ranks": each.ranks, "buffer_mib": hccl.group_buffer_mib(run, each)}
            for each in communicators
        ],
        "host": node_host_bytes(run, limit) | {"limit_bytes": limit},
        "not_modelled": parts,
    }


def kv_cache_plan(run: RunSpec, memory: RunMemory, mean_tokens: float) -> dict[str, Any] | None:
    """Return {die_bytes, held_tokens, sequences, needed_tokens, safe_sequences, expected_tokens, preemption}.

    None without a modelled KV cache. Tokens are those of whole blocks, of the fullest die. sequences: max_num_seqs, the
    most that run at once, a sequence of the log-prob check among them; needed_tokens: of as many at max_model_len;
    safe_sequences: as many are never preempted. expected_tokens: of `sequences` of `mean_tokens` each. preemption:
    impossible where the cache holds the needed tokens, likely where it does not even hold the expected ones.
    """
    setting, sequences = memory.setting, run.max_num_seqs
    if not (setting.vllm_bytes and run.samples):
        return None
    size = min(group_bytes(setting, rank)["kv_cache"] for rank in {0, setting.rollout.world_size - 1})
    blocks = max(size // (KV_BLOCK_TOKENS * setting.inventory.model.kv_bytes) - 1, 0)  # vLLM never gives out the first
    one = -(-run.max_model_len // KV_BLOCK_TOKENS)
    expected, held = round(sequences * mean_tokens), blocks * KV_BLOCK_TOKENS
    preemption = "likely" if expected > held else "possible"
    return {
        "die_bytes": size,
        "held_tokens": held,
        "sequences": sequences,
        "needed_tokens": sequences * one * KV_BLOCK_TOKENS,
        "safe_sequences": blocks // one,
        "expected_tokens": expected,
        "preemption": "impossible" if sequences * one <= blocks else preemption,
    }


def engine_share(run: RunSpec, rollout: ParallelLayout, tokens: int, *sides: str) -> int:
    """Return the bytes of vLLM's share of a die that are left for weights and KV cache (see plan/expected.py).

    `rollout`: its layout. `tokens`: of its largest batch. HCCL's buffers are those of these sides of `run`.
    """
    buffers, share = hccl.buffer_bytes(run), run.verl.actor_rollout_ref.rollout.gpu_memory_utilization
    beside = CONTEXT_BYTES + engine_bytes(run.model, rollout, tokens) + sum(buffers[side] for side in sides)
    return max(int(share * run.hardware.seen_bytes) - beside, 0)


def followed_peaks(run: RunSpec) -> dict[str, Any]:
    """Return `expected.memory_peaks` of the run's own order alone."""
    setting, schedule, unmoved_groups = run_memory(run)
    return memory_peaks(schedule, setting, unmoved_groups)


def fewest_recomputed_layers(setting: Setting, step: Collection[RankGroup], room: int) -> PerStage:
    """Return the fewest first layers of each stage that an update must recompute to need at most `room` bytes of a die.

    The result is one number where it is the same for all stages. A stage for which even all layers are not enough has
    all of them.
    """
    train, given, found = setting.train, setting.passes, []
    assert given is not None  # line a3 counts activations
    for stage in range(train.pp):
        ranks = [each for each in step if train.coordinates(each.ranks[0]).pp == stage]
        updates = [phase for phase in ranks[0].moments if phase in ("update", "update_critic")]

        def fits(layers: int, ranks: list[RankGroup] = ranks, updates: list[str] = updates) -> bool:
            passes = replace(given, recompute_layers=layers, recompute_together=1)
            tried = replace(setting, passes=passes)
            return all(phase_peak(phase, ranks, tried)["peak_bytes"] <= room for phase in updates)

        most = len(train.stage_layers(stage, setting.inventory.model.num_hidden_layers))
        # one recomputed layer may need more than none: all of it exists while it is recomputed
        found.append(0 if fits(0) else bisect.bisect_left(range(most), True, lo=1, key=fits))
    return found[0] if len(set(found)) == 1 else tuple(found)


def recompute_keys(layers: PerStage | Literal["auto"]) -> dict[str, Any]:
    """Return the keys that recompute the first layers of each stage."""
    number = layers if isinstance(layers, int | str) else list(layers)
    kwargs = {"granularity": "full", "method": "block", "num_layers": number}
    return {CHECKPOINTING_KEY: True, **{f"{_KWARGS}{name}": value for name, value in kwargs.items()}}


def with_planned_keys(run: RunSpec) -> RunSpec:
    """Return `run` with the keys that the memory plan decides: recomputed layers that are auto, and max_num_seqs."""
    return with_held_requests(with_recompute(run))


def with_recompute(run: RunSpec) -> RunSpec:
    """Return `run`, or where activations_checkpoint_num_layers is auto the run with the fewest layers in its place.

    The number is that of `fewest_recomputed_layers` with MARGIN_BYTES left, or all layers where sizes do not divide,
    which the checks of a plan refuse. Recomputed activations are equal, so the number changes no result, also in a
    resumed run. Raise ConfigError on line pypi, which counts no activations, and for another granularity or method.
    """
    if OmegaConf.select(run.verl, LAYERS_KEY) != "auto":
        return run
    if run.line != A3:
        raise ConfigError(f"{LAYERS_KEY} is auto; expected a number: activations are modelled for line a3 only")
    given = run.verl.actor_rollout_ref.model.enable_gradient_checkpointing
    layers: PerStage = 0
    for key, value in recompute_keys(0).items():
        found = OmegaConf.select(run.verl, key)
        if key not in (LAYERS_KEY, CHECKPOINTING_KEY) and found not in (None, value):
            raise ConfigError(f"{key} is {found}; expected {value} with {LAYERS_KEY}=auto")
    if given:
        try:
            setting, schedule, unmoved_groups = run_memory(run.with_verl({LAYERS_KEY: 0}))
            step = simulate_ranks(schedule, setting, unmoved_groups)
            layers = fewest_recomputed_layers(setting, step, run.hardware.seen_bytes - MARGIN_BYTES)
        except ConfigError:
            layers = run.model.num_hidden_layers
    keys = {**recompute_keys(layers), CHECKPOINTING_KEY: given}
    return run.with_verl(keys | {key.replace("actor_rollout_ref.", "critic."): value for key, value in keys.items()})


def with_held_requests(run: RunSpec) -> RunSpec:
    """Return `run`, or with a lower max_num_seqs where the Ascend scheduler would preempt requests and then drop them.

    `whole_prompt_checks` says so. The number is a multiple of 8, as graphs of tensor-parallel ranks need one of TP.
    """
    if not run.takes_whole_prompts or run.step_budget >= run.max_model_len or _longest_kv_cache(run) is None:
        return run

    def drops(sequences: int) -> bool:
        cache = _longest_kv_cache(changed_run(run, {MAX_NUM_SEQS_KEY: sequences}))
        return cache is None or cache["preemption"] != "impossible"

    sizes = [*range(8, run.max_num_seqs, 8), run.max_num_seqs]
    held = bisect.bisect_left(sizes, True, key=drops)  # fewer sequences also make HCCL's buffers smaller
    if held in (0, len(sizes)):
        return run
    return replace(changed_run(run, {MAX_NUM_SEQS_KEY: sizes[held - 1]}), lowered_from=run.max_num_seqs)


def _longest_kv_cache(run: RunSpec) -> dict[str, Any] | None:
    """Return `kv_cache_plan` of the longest sequences; None too where sizes do not divide."""
    try:
        return kv_cache_plan(run, run_memory(run), mean_tokens=run.longest_tokens)
    except ConfigError:
        return None


def whole_prompt_checks(run: RunSpec) -> Iterator[Check]:
    """Refuse the Ascend scheduler, which takes prompts whole, where it could drop a request without an answer.

    It drops a waiting request of more tokens than a step has (vllm_ascend.core.scheduler.AscendScheduler.schedule): a
    long prompt, or a preempted response with its prompt. None is preempted where the KV cache holds all of them.
    """
    if not run.takes_whole_prompts:
        return
    longest, budget, prompt = run.max_model_len, run.step_budget, run.verl.data.max_prompt_length
    if budget >= longest:
        yield Check("Ascend scheduler", True, f"max_num_batched_tokens {budget} holds prompt + response {longest}")
        return
    cache = _longest_kv_cache(run)
    held, needed = (cache["held_tokens"], cache["needed_tokens"]) if cache else (None, None)
    if budget >= prompt and cache and cache["preemption"] == "impossible":
        text = f"max_num_seqs lowered from {run.lowered_from} to {run.max_num_seqs}: " if run.lowered_from else ""
        text += f"{run.max_num_seqs} requests of {longest} tokens need {needed} of the {held} tokens that the KV cache "
        text += "of a die holds (modelled), so none is preempted and then dropped"
        yield Check("Ascend scheduler", True, text, note=run.lowered_from is not None)
        return
    fault = (
        f"actor_rollout_ref.rollout.max_num_batched_tokens is {budget}, expected >= {longest} with "
        "recipe.rollout.ascend.scheduler=ascend: it schedules a prompt, or a preempted response with its prompt, as a "
        "whole and drops a longer one without an answer (vllm_ascend.core.scheduler.AscendScheduler.schedule)"
    )
    if budget < prompt:
        fault += f"; a prompt alone has up to {prompt} tokens"
    elif cache:
        fault += f"; requests may be preempted, as {run.max_num_seqs} of {longest} tokens need {needed} tokens of KV "
        fault += f"cache, and a die holds {held} (modelled): lower {MAX_NUM_SEQS_KEY} or the lengths"
    yield Check("Ascend scheduler", False, fault)


def memory_shortages(phases: Iterable[dict[str, Any]], room: int) -> list[str]:
    """Return a sentence for each group of phases that a die of `room` bytes cannot hold, grouped by the largest terms.

    It says how much the die needs, of which terms, in which phases, and which key to lower where a pass is the most.
    """
    short = [phase for phase in phases if phase["peak_bytes"] > room]
    failing: dict[tuple, list[dict[str, Any]]] = {}  # phases that fail alike, such as wake_kv and rollout
    for phase in short:
        largest = tuple(sorted(phase["bytes"], key=phase["bytes"].get, reverse=True)[:3])
        failing.setdefault((phase["rank"], largest), []).append(phase)
    sentences = []
    for (rank, largest), phases in failing.items():
        phase = max(phases, key=lambda each: each["peak_bytes"])
        terms = ", ".join(f"{term} {phase['bytes'][term] / 1e9:.2f}" for term in largest)
        names = ", ".join(each["phase"] for each in phases)
        need = f"{phase['peak_bytes'] / 1e9:.2f} GB of {room / 1e9:.2f}"
        keys = [_MICRO_BATCH_KEYS[each["phase"]] for each in phases if each["phase"] in _MICRO_BATCH_KEYS]
        todo = f"; lower {' and '.join(keys)}" if keys and largest[0] in ("logits", "working_activations") else ""
        sentences.append(f"{names}: die {rank} needs {need}; largest: {terms}{todo}")
    return sentences


def recomputation(run: RunSpec) -> tuple[PerStage, int]:
    """Return (layers of each stage whose forward pass is recomputed, how many at once); selective counts as none.

    The configuration has no auto (see `with_recompute`). Raise ConfigError for a list without one number for each
    stage.
    """
    model = run.verl.actor_rollout_ref.model
    given = model.get("gradient_checkpointing_kwargs") or {}
    if not model.enable_gradient_checkpointing or given.get("activations_checkpoint_granularity") != "full":
        return 0, 1
    number: Any = given.get("activations_checkpoint_num_layers")
    if given.get("activations_checkpoint_method") != "block":
        return (run.model.num_hidden_layers, number) if number else (0, 1)
    if not OmegaConf.is_list(number):
        return number or 0, 1
    if len(number) != (stages := run.train.pp):
        raise ConfigError(f"{LAYERS_KEY} has {len(number)} numbers; expected one for each of {stages} pipeline stages")
    return tuple(number), 1


def run_passes(run: RunSpec, replicas: int) -> Passes:
    """Return the passes whose activations a plan counts, at the longest samples.

    On line a3, which alone counts them, verl sizes micro batches in samples; a rank has 1/CP of a sample's tokens.
    """
    data, section, train = run.verl.data, run.verl.actor_rollout_ref, run.recipe.train
    longest, actor = -(-run.longest_tokens // run.train.cp), section.actor
    samples = actor.ppo_mini_batch_size * section.rollout.n // replicas
    size = actor.ppo_micro_batch_size_per_gpu or 1  # another check refuses null
    layers, together = recomputation(run)
    critic_size = critic_batches = 0
    if (critic := run.critic) is not None:
        critic_size = critic.ppo_micro_batch_size_per_gpu or 1
        critic_batches = max(1, critic.ppo_mini_batch_size * critic.rollout_n // replicas // critic_size)
    return Passes(
        update_tokens=size * longest,
        log_prob_tokens=(section.rollout.log_prob_micro_batch_size_per_gpu or 1) * longest,
        ref_tokens=(section.ref.log_prob_micro_batch_size_per_gpu or 1) * longest,
        micro_batches=max(1, samples // size),
        recompute_layers=layers,
        recompute_together=together,
        imbalance=1.0 if train.balanced_routing else UNBALANCED_RATIO,
        unpadded=train.unpadded_attention,
        entropy=bool(actor.entropy_coeff),
        chunked_logits={"logprob.in_chunks", "logprob.entropy_in_chunks"} <= run.rows,
        recorded_tokens=data.train_batch_size * section.rollout.n // replicas * longest if train.routing_replay else 0,
        gemm_gradient_accumulation_fusion=train.gemm_gradient_accumulation_fusion,
        gradient_accumulation_fusion=train.gradient_accumulation_fusion,
        critic_tokens=critic_size * longest,
        critic_batches=critic_batches,
        reward_tokens=(run.verl.reward_model.micro_batch_size_per_gpu or 1) * longest,
    )


def cached_bytes(run: RunSpec) -> int:
    """Return the most bytes of the tensor cache for all samples of a step: int32 ids, fp32 log-probs of the responses.

    Log-probs are those of rollout, of the old policy unless that pass is left out, and of the reference if a loss
    needs them.
    """
    data = run.verl.data
    # ids of the responses and log-probs of rollout, of the old policy, of the reference
    columns = 2 + (not run.recipe.train.skip_old_log_prob) + run.uses_reference
    tokens = data.max_prompt_length + data.max_response_length * columns
    return 4 * data.train_batch_size * run.verl.actor_rollout_ref.rollout.n * tokens


def node_host_bytes(run: RunSpec, node_bytes: int | None) -> dict[str, Any]:
    """Return the modelled host memory of the fullest node; `node_bytes`: of a node, None where not known.

    bytes: {memory group: what workers pin}, in sum pinned_bytes; workers_bytes: of their processes; object_store_bytes:
    of Ray's object store at its most; node_bytes: all of these. Without dies (platform cpu, npu_emulated) `bytes` has
    all states of training and rollout. Raise ConfigError where sizes do not divide.
    """
    setting, schedule, unmoved_groups = run_memory(run)
    dies, no_device = run.verl.trainer.n_gpus_per_node, run.platform in NO_DEVICE
    whole = replace(setting, swap_pieces=None)
    swapped, saves = setting.swap_pieces is not None, run.verl.trainer.save_freq > 0
    stage_bytes, nodes = dict[int, dict[str, int]](), list[Counter[str]]()
    for rank in range(setting.train.world_size):
        stage = setting.train.coordinates(rank).pp
        if stage not in stage_bytes:  # ranks of one stage pin equally much
            sizes = group_bytes(setting if no_device else whole, rank)
            sizes["reward_params"] *= setting.reward_models  # the device has one model at a time
            if not no_device:
                sizes = host_bytes(sizes, schedule, unmoved_groups, swapped=swapped, saves=saves)
            stage_bytes[stage] = sizes
        if rank % dies == 0:  # nodes have consecutive ranks
            nodes.append(Counter())
        nodes[-1].update(stage_bytes[stage])
    pinned = {group: size for group, size in max(nodes, key=Counter.total).items() if size}
    parts = {
        "pinned_bytes": sum(pinned.values()),
        "workers_bytes": 0 if no_device else WORKER_BYTES * dies,
        "object_store_bytes": object_store_bytes(run, node_bytes),
    }
    return {"bytes": pinned, **parts, "node_bytes": sum(parts.values())}


def object_store_bytes(run: RunSpec, node_bytes: int | None) -> int:
    """Return the most bytes of Ray's object store on a node, in /dev/shm: the run's, or `ray start`'s default."""
    if run.recipe.ray_address is None and run.platform in NO_DEVICE:
        return max(_OBJECT_STORE_BYTES, 2 * recorded_bytes(run))
    return _STORE_MAX_BYTES if node_bytes is None else min(_STORE_MAX_BYTES, int(_STORE_SHARE * node_bytes))


def host_limit(run: RunSpec) -> int | None:
    """Return the bytes of a node's host memory: recipe.memory.host_gib, this machine's if it has dies, or None."""
    given = run.recipe.memory.host_gib
    if given is not None:
        return given << 30
    here = run.recipe.platform == "npu" and any(DEVICE_FOLDER.glob("davinci[0-9]*"))
    return psutil.virtual_memory().total if here else None
