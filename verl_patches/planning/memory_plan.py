"""The memory of a run as plain data: the worst die of each phase, the fullest node, and the settings that fit a die.

Everything is modelled, in planning/expected.py and planning/activations.py.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from omegaconf import DictConfig, OmegaConf

from verl_patches.config import hccl
from verl_patches.config.compose import graph_arguments, model_shape_of, rollout_library
from verl_patches.config.recipe import VLLM_DTYPES
from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import Inventory, ModelShape, build_inventory
from verl_patches.layout.parallel import ParallelLayout, critic_of, rollout_layout_of, train_layout_of
from verl_patches.layout.phases import reward_models, samples, trains_actor
from verl_patches.memory.schedule import SCHEDULE, VERL, Schedule, direct_sync, schedule_of
from verl_patches.planning.activations import UNBALANCED, Passes, PerStage
from verl_patches.planning.expected import Alike, Setting, group_bytes, host_bytes, peaks, phase_peak, simulated
from verl_patches.platform.npu.machine import HARDWARE
from verl_patches.upstream.checkouts import LINE

DEVICES = Path("/dev")
# Left free of a die by an update whose recomputed layers the plan chooses: for what the plan does not count
# (fragmentation of torch's pool, workspaces of kernels)
MARGIN_BYTES = 5 * 10**9
CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing"
_KWARGS = "actor_rollout_ref.model.gradient_checkpointing_kwargs.activations_checkpoint_"
LAYERS = f"{_KWARGS}num_layers"


class RunMemory(NamedTuple):
    """What a run's memory follows from: its sizes, its order of a step, and the memory groups that never move.

    `setting`: with buffers of verl's own weight sync where that one runs.
    """

    setting: Setting
    schedule: Schedule
    stays: frozenset[str]


def run_memory(config: DictConfig, rows: Collection[str]) -> RunMemory:
    """By `rows`, the ids of the rows that are on. ConfigError where sizes do not divide."""
    config = with_recompute(config, rows)
    recipe, rollout = config.recipe, config.actor_rollout_ref.rollout
    train, inventory = train_layout_of(config), inventory_of(model_shape_of(config), VLLM_DTYPES[recipe.dtype])
    npu = recipe.platform == "npu"
    setting = Setting(
        inventory,
        train,
        rollout_layout_of(config),
        train_library="mindspeed" if recipe.line == LINE else "megatron-local",
        rollout_library=rollout_library(config),
        bucket_bytes=recipe.reshard.bucket_bytes if direct_sync(rows) else None,
        swap_pieces=recipe.train.swap_optimizer_times if recipe.train.swap_optimizer else None,
        vllm_bytes=int(rollout.gpu_memory_utilization * die_bytes(config)) if npu else 0,
        tensor_cache_bytes=cached_bytes(config) // train.dp if recipe.tensor_cache.enabled else 0,
        absorbed_copies=npu or recipe.line == LINE,  # MindSpeed's view on the CPU too
        passes=passes_of(config, train.dp, rows) if recipe.line == LINE else None,
        hccl=hccl.buffer_bytes(config, inventory.model) if npu else None,
        critic=critic_of(config) is not None,
        reward_models=len(reward_models(recipe)),
        sampled=samples(recipe),
        actor=trains_actor(recipe),
        reference=config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward,
    )
    return RunMemory(setting, *schedule_of(config.actor_rollout_ref, recipe, rows, critic=critic_of(config)))


def memory_plan(config: DictConfig, rows: Collection[str]) -> dict[str, Any]:
    """{modelled, hbm_bytes, followed, swapped, recompute_layers, orders, communicators, host, not_modelled}.

    Bytes of the worst rank. `recompute_layers`: a number for all stages or a list of one for each, None where
    activations are not modelled.

    `orders` holds `expected.peaks` for our order of a step, for verl's on this line with verl's own weight sync, and
    for the run's own order, which `followed` names; it depends on `rows`, the ids of the rows
    that are on. Activations are counted on line a3, HCCL's buffers and CANN's context on platform npu. `hbm_bytes` is
    what a process sees of a die, None on other platforms, where the KV cache is not modelled. `host`: {bytes: of a
    node by group, node_bytes, limit_bytes (`host_limit`)}. ConfigError where sizes do not divide.
    """
    run, npu, recipe = run_memory(config, rows), config.recipe.platform == "npu", config.recipe
    ours = replace(run.setting, bucket_bytes=recipe.reshard.bucket_bytes)
    layers = None if run.setting.passes is None else run.setting.passes.recompute_layers
    compared = [(SCHEDULE, ours), (VERL[recipe.line], replace(ours, bucket_bytes=None))]
    compared = [(order.of_run(recipe, run.setting.critic), setting) for order, setting in compared]
    if run.schedule.name not in (order.name for order, _ in compared):
        compared.append((run.schedule, run.setting))
    return {
        "modelled": True,
        "hbm_bytes": die_bytes(config) if npu else None,
        "followed": run.schedule.name,
        "orders": [peaks(order, setting, run.stays) for order, setting in compared],
        "swapped": recipe.train.swap_optimizer,
        "recompute_layers": layers if layers is None or isinstance(layers, int) else list(layers),
        "communicators": _communicators(config, model_shape_of(config)) if npu else [],
        "host": _host(config, run),
        "not_modelled": _not_modelled(run.setting, npu, len(graph_arguments(config).get("graph_batch_sizes") or ())),
    }


def followed_peaks(config: DictConfig, rows: Collection[str]) -> dict[str, Any]:
    """Only `expected.peaks` of the run's own order."""
    setting, schedule, stays = run_memory(config, rows)
    return peaks(schedule, setting, stays)


def settings_that_fit(config: DictConfig, rows: Collection[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """({key: value} with which the configuration's own layout fits a die, its phases with them, as `peaks` has them).

    The fewest recomputed layers of each stage that leave MARGIN_BYTES, and where it is needed smaller micro batches of
    log-probs and a smaller share for vLLM, of whose KV cache at least half stays. Where these are not enough a phase
    exceeds the die.
    """
    setting, schedule, stays = run_memory(config, rows)
    step = simulated(schedule, setting, stays)
    choices, keys, phases = {}, {}, []
    if setting.passes is not None:
        choices, layers = _choices(config), fewest_recomputed(setting, step, die_bytes(config) - MARGIN_BYTES)
        keys = recompute_keys(layers)
        setting = replace(setting, passes=replace(setting.passes, recompute_layers=layers, recompute_together=1))
    if setting.reward_models and choices and "ref" in step[0].moments:  # their micro batch follows the reference's
        chosen, _ = _first_that_fits("ref", step, setting, choices["ref"], die_bytes(config))
        tokens = next(changes for keys, changes in choices["ref"] if keys == chosen)["ref_tokens"]
        setting = replace(setting, passes=replace(setting.passes, reward_tokens=tokens))
    for phase in step[0].moments:
        chosen, peak = _first_that_fits(phase, step, setting, choices.get(phase, [({}, {})]), die_bytes(config))
        keys |= chosen
        phases.append(peak)
    cached = [peak for peak in phases if "kv_cache" in peak["bytes"]]
    over = max((peak["peak_bytes"] - die_bytes(config) for peak in cached), default=0)
    if 0 < 2 * over <= min(peak["bytes"]["kv_cache"] for peak in cached):
        smaller = config.copy()
        share = (
            smaller.actor_rollout_ref.rollout.gpu_memory_utilization - math.ceil(100 * over / die_bytes(config)) / 100
        )
        keys["actor_rollout_ref.rollout.gpu_memory_utilization"] = round(share, 2)
        smaller.actor_rollout_ref.rollout.gpu_memory_utilization = round(share, 2)
        return keys, settings_that_fit(smaller, rows)[1]
    return keys, phases


def _first_that_fits(
    phase: str,
    step: Collection[Alike],
    setting: Setting,
    options: Sequence[tuple[dict[str, Any], dict[str, int]]],
    room: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(keys, peak) of the first option with which a die holds the phase, else of the last; from 1 on peaks only fall.

    `options`: (keys, what they change in `Passes`).
    """

    def peak(place: int) -> dict[str, Any]:
        changes = options[place][1]
        passes = replace(setting.passes, **changes) if changes else setting.passes
        return phase_peak(phase, step, replace(setting, passes=passes))

    def fits(place: int) -> bool:
        return peak(place)["peak_bytes"] <= room

    place, last = 0, len(options) - 1
    if not fits(0):
        place = bisect.bisect_left(range(last), True, lo=min(1, last), key=fits)
    return options[place][0], peak(place)


def _choices(config: DictConfig) -> dict[str, list[tuple[dict[str, Any], dict[str, int]]]]:
    """{phase: [(keys, what they change in `Passes`)]}, the fastest first."""
    longest, choices = config.data.max_prompt_length + config.data.max_response_length, {}
    for phase, side, tokens in (("ref", "ref", "ref_tokens"), ("old_log_prob", "rollout", "log_prob_tokens")):
        key = f"actor_rollout_ref.{side}.log_prob_micro_batch_size_per_gpu"
        given = OmegaConf.select(config, key) or 1
        halves = [given >> n for n in range(given.bit_length())]
        choices[phase] = [({key: size}, {tokens: size * longest}) for size in halves]
    return choices


def fewest_recomputed(setting: Setting, step: Collection[Alike], room: int) -> PerStage:
    """The fewest first layers of each stage that an update must recompute to need at most `room` bytes of a die.

    One number where all stages have the same. All layers of a stage where even these are not enough.
    """
    train, found = setting.train, []
    for stage in range(train.pp):
        ranks = [each for each in step if train.coordinates(each.ranks[0]).pp == stage]
        updates = [phase for phase in ranks[0].moments if phase in ("update", "update_critic")]

        def fits(layers: int, ranks: list[Alike] = ranks, updates: list[str] = updates) -> bool:
            passes = replace(setting.passes, recompute_layers=layers, recompute_together=1)
            tried = replace(setting, passes=passes)
            return all(phase_peak(phase, ranks, tried)["peak_bytes"] <= room for phase in updates)

        most = len(train.stage_layers(stage, setting.inventory.model.num_hidden_layers))
        # one recomputed layer may need more than none: it is there whole while it is made again
        found.append(0 if fits(0) else bisect.bisect_left(range(most), True, lo=1, key=fits))
    return found[0] if len(set(found)) == 1 else tuple(found)


def recompute_keys(layers: PerStage) -> dict[str, Any]:
    """The keys that recompute the first layers of each stage."""
    number = layers if isinstance(layers, int) else list(layers)
    kwargs = {"granularity": "full", "method": "block", "num_layers": number}
    return {CHECKPOINTING: True, **{f"{_KWARGS}{name}": value for name, value in kwargs.items()}}


def with_recompute(config: DictConfig, rows: Collection[str]) -> DictConfig:
    """`config`, or where activations_checkpoint_num_layers is auto a copy that has the fewest layers in its place.

    Those of `fewest_recomputed` with MARGIN_BYTES left. Recomputed activations are the same values, so another number
    changes no result, also in a resumed run. All layers where sizes do not divide, which the checks of a plan refuse.
    ConfigError on line pypi, whose activations are not counted, and for another granularity or method.
    """
    if OmegaConf.select(config, LAYERS) != "auto":
        return config
    config = config.copy()
    if config.recipe.line != LINE:
        raise ConfigError(f"{LAYERS} is auto; expected a number: activations are modelled for line a3 only")
    given, layers = config.actor_rollout_ref.model.enable_gradient_checkpointing, 0
    for key, value in recompute_keys(0).items():
        found = OmegaConf.select(config, key)
        if key not in (LAYERS, CHECKPOINTING) and found not in (None, value):
            raise ConfigError(f"{key} is {found}; expected {value} with {LAYERS}=auto")
    OmegaConf.update(config, LAYERS, 0)
    if given:
        try:
            setting, schedule, stays = run_memory(config, rows)
            step = simulated(schedule, setting, stays)
            layers = fewest_recomputed(setting, step, die_bytes(config) - MARGIN_BYTES)
        except ConfigError:
            layers = model_shape_of(config).num_hidden_layers
    for key, value in {**recompute_keys(layers), CHECKPOINTING: given}.items():
        for name in (key, key.replace("actor_rollout_ref.", "critic.")):  # the critic's follow it
            OmegaConf.update(config, name, value, merge=False, force_add=True)
    return config


def die_bytes(config: DictConfig) -> int:
    """What a process sees of the memory of a die of recipe.hardware."""
    return HARDWARE[config.recipe.hardware].seen_bytes


def exceeding(phases: Iterable[dict[str, Any]], room: int) -> list[str]:
    """Of phases that a die of `room` bytes does not hold: one sentence for those of a die with the same largest terms.

    It says what the die needs, of what, for what.
    """
    short = [phase for phase in phases if phase["peak_bytes"] > room]
    alike: dict[tuple, list[dict[str, Any]]] = {}  # such as wake_kv and rollout
    for phase in short:
        largest = tuple(sorted(phase["bytes"], key=phase["bytes"].get, reverse=True)[:3])
        alike.setdefault((phase["rank"], largest), []).append(phase)
    said = []
    for (rank, largest), phases in alike.items():
        phase = max(phases, key=lambda each: each["peak_bytes"])
        terms = ", ".join(f"{term} {phase['bytes'][term] / 1e9:.2f}" for term in largest)
        names = ", ".join(each["phase"] for each in phases)
        need = f"{phase['peak_bytes'] / 1e9:.2f} GB of {room / 1e9:.2f}"
        said.append(f"{names}: die {rank} needs {need}; largest: {terms}")
    return said


@functools.lru_cache(maxsize=2)
def inventory_of(model: ModelShape, dtype: str) -> Inventory:
    """Of `model` in torch's `dtype`. Cached because a search plans the same model many times."""
    return build_inventory(replace(model, torch_dtype=dtype))


def _not_modelled(setting: Setting, npu: bool, graphs: int) -> list[str]:
    parts = ["fragmentation of torch's pool", "Ray's object store and the processes on the host"]
    if setting.passes is None:
        parts.append("activations (line a3 only)")
    if npu:
        parts.append(f"{graphs} captured graphs of the rollout engine (its activations: in gpu_memory_utilization)")
    else:
        parts.append("the KV cache, HCCL's buffers and CANN's context (platform npu only)")
    return parts


def _communicators(config: DictConfig, model: ModelShape) -> list[dict[str, Any]]:
    return [
        {
            "side": group.side,
            "group": group.name,
            "ranks": group.ranks,
            "buffer_mib": hccl.group_buffer_mib(config, model, group),
        }
        for group in hccl.groups(config)
        if group.communicates
    ]


def recomputation(config: DictConfig) -> tuple[PerStage, int]:
    """(layers of each stage whose forward pass is computed again, how many at once); selective counts as none.

    Of a configuration without auto (`with_recompute`). ConfigError for a list that has not one number for each stage.
    """
    model = config.actor_rollout_ref.model
    given = model.get("gradient_checkpointing_kwargs") or {}
    if not model.enable_gradient_checkpointing or given.get("activations_checkpoint_granularity") != "full":
        return 0, 1
    number = given.get("activations_checkpoint_num_layers")
    if given.get("activations_checkpoint_method") != "block":
        return (model_shape_of(config).num_hidden_layers, number) if number else (0, 1)
    if not OmegaConf.is_list(number):
        return number or 0, 1
    if len(number) != (stages := config.actor_rollout_ref.actor.megatron.pipeline_model_parallel_size):
        raise ConfigError(f"{LAYERS} has {len(number)} numbers; expected one for each of {stages} pipeline stages")
    return tuple(number), 1


def passes_of(config: DictConfig, replicas: int, rows: Collection[str]) -> Passes:
    """Activations are those of the longest samples; micro batches of verl at this line are of a number of samples."""
    data, section, train = config.data, config.actor_rollout_ref, config.recipe.train
    longest, actor = data.max_prompt_length + data.max_response_length, section.actor
    samples = actor.ppo_mini_batch_size * section.rollout.n // replicas
    size = actor.ppo_micro_batch_size_per_gpu or 1  # null is refused by another check
    layers, together = recomputation(config)
    critic_size = critic_batches = 0
    if (critic := critic_of(config)) is not None:
        critic_size = critic.ppo_micro_batch_size_per_gpu or 1
        critic_batches = max(1, critic.ppo_mini_batch_size * critic.rollout_n // replicas // critic_size)
    return Passes(
        update_tokens=size * longest,
        log_prob_tokens=(section.rollout.log_prob_micro_batch_size_per_gpu or 1) * longest,
        ref_tokens=(section.ref.log_prob_micro_batch_size_per_gpu or 1) * longest,
        micro_batches=max(1, samples // size),
        recompute_layers=layers,
        recompute_together=together,
        imbalance=1.0 if train.balanced_routing else UNBALANCED,
        unpadded=train.unpadded_attention,
        entropy=bool(actor.entropy_coeff),
        chunked_logits={"logprob.in_chunks", "logprob.entropy_in_chunks"} <= set(rows),
        recorded_tokens=data.train_batch_size * section.rollout.n // replicas * longest if train.routing_replay else 0,
        fused_expert_wgrad=train.fused_expert_wgrad,
        fused_linear_wgrad=train.fused_linear_wgrad,
        critic_tokens=critic_size * longest,
        critic_batches=critic_batches,
        reward_tokens=(config.reward_model.micro_batch_size_per_gpu or 1) * longest,
    )


def cached_bytes(config: DictConfig) -> int:
    """Most bytes of the tensor cache for all samples of a step: int32 ids, fp32 log-probs of the responses.

    Log-probs are those of rollout, of the old policy unless that pass is left out, and of the reference if a loss
    needs them.
    """
    data, actor = config.data, config.actor_rollout_ref.actor
    columns = 2  # ids of the responses, log-probs of rollout
    if not config.recipe.train.skip_old_log_prob:
        columns += 1
    if actor.use_kl_loss or config.algorithm.use_kl_in_reward:
        columns += 1
    tokens = data.max_prompt_length + data.max_response_length * columns
    return 4 * data.train_batch_size * config.actor_rollout_ref.rollout.n * tokens


def pinned_bytes(config: DictConfig, rows: Collection[str]) -> int:
    """Bytes that the workers of the fullest node pin."""
    return _host(config, run_memory(config, rows))["node_bytes"]


def states_bytes(config: DictConfig, rows: Collection[str]) -> int:
    """Bytes of all memory groups of the fullest node, where dies are emulated or absent."""
    setting = replace(run_memory(config, rows).setting, bucket_bytes=config.recipe.reshard.bucket_bytes)
    nodes = _of_nodes(config, setting.train, lambda rank: _on_host(setting, rank))
    return max(sum(node.values()) for node in nodes)


def _of_nodes(
    config: DictConfig, train: ParallelLayout, of_rank: Callable[[int], dict[str, int]]
) -> list[dict[str, int]]:
    """{memory group: bytes} of each node, which has consecutive ranks; `of_rank` is called once for each stage."""
    dies, of_stage, nodes = config.trainer.n_gpus_per_node, {}, []
    for rank in range(train.world_size):
        stage = train.coordinates(rank).pp
        if stage not in of_stage:
            of_stage[stage] = of_rank(rank)
        if rank % dies == 0:
            nodes.append(Counter())
        nodes[-1].update(of_stage[stage])
    return nodes


def _on_host(setting: Setting, rank: int) -> dict[str, int]:
    """`group_bytes` with all reward models, of which the device has one at a time."""
    sizes = group_bytes(setting, rank)
    return {**sizes, "reward_params": sizes["reward_params"] * setting.reward_models}


def _host(config: DictConfig, run: RunMemory) -> dict[str, Any]:
    """The node whose workers pin most. The parts of a host copy are equal within a stage."""
    whole, swapped = replace(run.setting, swap_pieces=None), run.setting.swap_pieces is not None

    def of_rank(rank: int) -> dict[str, int]:
        sizes = _on_host(whole, rank)
        return host_bytes(sizes, run.schedule, run.stays, swapped=swapped, saves=config.trainer.save_freq > 0)

    fullest = max(_of_nodes(config, run.setting.train, of_rank), key=lambda node: sum(node.values()))
    return {"bytes": dict(fullest), "node_bytes": sum(fullest.values()), "limit_bytes": host_limit(config)}


def host_limit(config: DictConfig) -> int | None:
    """Bytes of a node's host memory: recipe.memory.host_gib, else this machine's where it has dies; else None."""
    given = config.recipe.memory.host_gib
    if given is not None:
        return given << 30
    here = config.recipe.platform == "npu" and any(DEVICES.glob("davinci[0-9]*"))
    return psutil.virtual_memory().total if here else None
