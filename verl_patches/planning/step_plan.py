"""What the step model says of a configuration: its inputs, seconds by phase, traffic, ports. No torch."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig

from verl_patches.config import hccl
from verl_patches.config.checks import sync_blocks
from verl_patches.config.compose import graph_arguments, model_shape_of, rollout_library, seats_of
from verl_patches.config.recipe import HCCL_PORTS, VLLM_DTYPES
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.layout.inventory import ModelShape
from verl_patches.layout.parallel import ParallelLayout, critic_of, rollout_layout_of, train_layout_of
from verl_patches.layout.phases import STEP_PHASES, reward_models, samples, trains_actor
from verl_patches.memory.schedule import Moment, direct_sync
from verl_patches.planning.calibration import FITTED, MEAN_PROMPT, errors
from verl_patches.planning.expected import group_bytes, moments_of
from verl_patches.planning.memory_plan import recomputation, run_memory
from verl_patches.planning.step_model import (
    DP_SYNC_S,
    EMPTY_CACHE_S_PER_BYTE,
    Lengths,
    Offload,
    StepInput,
    SyncTraffic,
    direct_sync_bound,
    driver_bytes,
    stage_elements,
    step_time,
    tokens_per_s_per_die,
    verl_sync,
)
from verl_patches.platform import as_npu
from verl_patches.platform.npu.machine import HARDWARE
from verl_patches.reshard.blocks import Block
from verl_patches.watch.bounds import MODELLED, WAIT_SHARE, Bounds

log = logging.getLogger(__name__)
# CPU time of a decode step at batch 64 with DECODE_ROWS to that without (tests/benchmarks/decode_step.py); assumed to
# hold for all of engine_step_s, which holds launches and copies too
ENGINE_RATIO = 0.6
DECODE_ROWS = {"rollout.outputs_at_the_end", "rollout.log_probs_at_once", "rollout.steps_alike"}
RESPONSE_TOKENS = 1000.0  # mean of responses that end by themselves, before the cut; assumed


@dataclass(frozen=True)
class Workload:
    """What no configuration says: mean tokens of prompts and of responses that end by themselves, backend of DP syncs.

    None: the published run's prompts, and RESPONSE_TOKENS. A mean of responses is not read where all have full length.
    """

    prompt_tokens: float | None = None
    response_tokens: float | None = None
    dp_sync: str = "hccl"

    def __post_init__(self):
        for name in ("prompt_tokens", "response_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected a number above 0")
        if self.dp_sync not in DP_SYNC_S:
            raise ConfigError(f"--dp-sync is {self.dp_sync!r}; expected one of {', '.join(DP_SYNC_S)}")

    @property
    def option(self) -> tuple[str, ...]:
        """The words of the command line that give it; none for the defaults."""
        given = {"--prompt-tokens": self.prompt_tokens, "--response-tokens": self.response_tokens}
        given["--dp-sync"] = None if self.dp_sync == "hccl" else self.dp_sync
        return tuple(word for name, value in given.items() if value is not None for word in (name, str(value)))


def step_input(
    config: DictConfig,
    rows: Collection[str],
    workload: Workload = Workload(),
    sync: SyncTraffic | None = None,
    offload: Offload | None = None,
    kv_bytes: float | None = None,
) -> StepInput:
    """The step model's input; `rows`: ids of the rows that are on. Without `sync` its upper bound, or verl's own."""
    recipe, data, section = config.recipe, config.data, config.actor_rollout_ref
    actor, rollout = section.actor, section.rollout
    train, train_batch, n = train_layout_of(config), data.train_batch_size, rollout.n
    lengths = _lengths(config, workload)
    length = lengths.prompt + lengths.mean_of_longest()
    seats = seats_of(config)
    graphs = tuple(graph_arguments(config).get("graph_batch_sizes") or (seats,)) if graph_arguments(config) else ()
    micro = actor.ppo_micro_batch_size_per_gpu
    if actor.use_dynamic_bsz or micro is None:
        micro = max(1, int(actor.ppo_max_token_len_per_gpu * train.cp // length))
    critic = critic_of(config)
    ref_used = actor.use_kl_loss or config.algorithm.use_kl_in_reward
    run = StepInput(
        model=model_in_dtype(config),
        train=train,
        rollout=rollout_layout_of(config),
        lengths=lengths,
        prompts=train_batch,
        samples=n,
        micro_batch=micro,
        ref_micro_batch=(section.ref.log_prob_micro_batch_size_per_gpu or micro) if ref_used else None,
        old_micro_batch=None if recipe.train.skip_old_log_prob else rollout.log_prob_micro_batch_size_per_gpu or micro,
        critic_micro_batch=None if critic is None else critic.ppo_micro_batch_size_per_gpu,
        reward_models=len(reward_models(recipe)),
        reward_micro_batch=config.reward_model.micro_batch_size_per_gpu or 1,
        mini_batches=max(1, train_batch // actor.ppo_mini_batch_size),
        epochs=actor.ppo_epochs,
        recompute_layers=recomputation(config)[0],
        alltoall_overlap=recipe.train.alltoall_overlap,
        swap_optimizer=recipe.train.swap_optimizer or actor.megatron.optimizer_offload,
        balanced_lengths=config.trainer.balance_batch,
        tensor_cache=recipe.tensor_cache.enabled,
        copies=1 if "dispatch.put_once" in rows else train.tp * train.pp,
        most_prompt=data.max_prompt_length,
        seats=seats,
        graph_sizes=graphs,
        engine_ratio=ENGINE_RATIO if DECODE_ROWS <= set(rows) else 1.0,
        token_budget=rollout.max_num_batched_tokens,
        prefix_caching=recipe.rollout.ascend.prefix_caching,
        shared_whole=rollout_library(config) == "vllm-ascend",
        dp_sync=workload.dp_sync,
        kv_bytes=kv_bytes,
        sampled=samples(recipe),
        actor=trains_actor(recipe),
        offload=offload or Offload(),
    )
    if sync is None:
        direct = direct_sync_bound(run.model, run, recipe.reshard.bucket_bytes)
        sync = direct if direct_sync(rows) else verl_sync(run.model, train)
    return replace(run, sync=sync)


def bounds_of(config: DictConfig, rows: Collection[str]) -> Bounds:
    """The watch's bounds of a run, on platform npu with the step model's times, where it has an answer."""
    watch, load_s = config.recipe.watch, config.recipe.timeouts.load_s
    modelled: dict[str, float] = {}
    if config.recipe.platform == "npu" and HARDWARE[config.recipe.hardware].timed:
        try:
            seconds = _longest_step(config, rows)
            modelled = {place: sum(seconds[phase] for phase in phases) for place, phases in MODELLED.items()}
        except (ValueError, LookupError, ArithmeticError, RecipeError) as error:  # none of them may end a run
            log.warning("watch: the step model has no times for this run, its bounds are recipe.watch's: %s", error)
    collective_s = WAIT_SHARE * hccl.exec_timeout_s(config)
    return Bounds(watch.first_s, watch.least_s, watch.factor, load_s, collective_s, modelled)


def _longest_step(config: DictConfig, rows: Collection[str]) -> dict[str, float]:
    """{phase: modelled seconds} of a step whose prompts and responses are as long as they may be."""
    offload, kv_bytes = offload_of(config, rows)
    run = step_input(config, rows, offload=offload, kv_bytes=kv_bytes or None)
    lengths = Lengths(config.data.max_prompt_length, config.data.max_response_length)
    return step_time(replace(run, lengths=lengths), FITTED)


def model_in_dtype(config: DictConfig) -> ModelShape:
    """The model's sizes in the dtype of the run."""
    return replace(model_shape_of(config), torch_dtype=VLLM_DTYPES[config.recipe.dtype])


def _lengths(config: DictConfig, workload: Workload) -> Lengths:
    data, forced = config.data, config.actor_rollout_ref.rollout.ignore_eos
    prompt = min(data.max_prompt_length, MEAN_PROMPT if workload.prompt_tokens is None else workload.prompt_tokens)
    mean = RESPONSE_TOKENS if workload.response_tokens is None else workload.response_tokens
    return Lengths(prompt, data.max_response_length, None if forced else mean)


def step_sections(config: DictConfig, rows: Collection[str], workload: Workload) -> dict[str, Any]:
    """{step, traffic, ports} of a plan, as JSON-ready data; all modelled.

    step: None on a CPU and on machines of which no published run has seconds. ConfigError where layouts or the weight
    sync do not fit.
    """
    model, train, rollout = model_in_dtype(config), train_layout_of(config), rollout_layout_of(config)
    sync, spread = verl_sync(model, train), {}
    if not samples(config.recipe):
        sync = SyncTraffic(0, 0, 0)
    elif direct_sync(rows):
        blocks = sync_blocks(config, train, rollout, model_shape_of(config))
        sync, spread = direct_traffic(blocks, train, config.recipe.reshard.bucket_bytes)
    offload, kv_bytes = offload_of(config, rows)
    run = step_input(config, rows, workload, sync, offload, kv_bytes or None)
    wire = {"received_bytes": round(sync.received_bytes), "sent_bytes": round(sync.sent_bytes), **spread}
    calls = {"old_log_prob": run.old_micro_batch, "ref": run.ref_micro_batch, "update": run.micro_batch}
    columns = {"old_log_prob": 0, "ref": 0, "update": 3}
    timed = HARDWARE[config.recipe.hardware].timed
    step = step_figures(run, workload) if as_npu(config.recipe.platform) and timed else None
    if step is not None and config.recipe.watch.action != "off":
        step["watch"] = str(bounds_of(config, rows))
    dispatch = {name: round(driver_bytes(run, columns[name])) for name, used in calls.items() if used}
    whole = replace(run, tensor_cache=False)  # value models get the trainer's batch, also with the cache
    if run.reward_models:
        dispatch["rm_scores"] = round(driver_bytes(whole, 0))
    if run.critic_micro_batch:
        dispatch |= {"values": round(driver_bytes(whole, 3)), "update_critic": round(driver_bytes(whole, 6))}
    return {
        "step": step,
        "traffic": {"weight_sync": {**wire, "collectives": sync.collectives}, "dispatch_bytes": dispatch},
        "ports": ports(config),
    }


def step_figures(run: StepInput, workload: Workload) -> dict[str, Any]:
    """Seconds by phase, their sum, tokens a second and die, what was assumed, and the model's error on each row."""
    seconds = step_time(run, FITTED)
    total = sum(seconds.values())
    absent = [] if run.critic_micro_batch else [phase.planned for phase in STEP_PHASES if phase.critic]
    return {
        "modelled": True,
        "phases": [{"phase": phase, "seconds": round(s, 3)} for phase, s in seconds.items() if phase not in absent],
        "total_s": round(total, 2),
        "tokens_per_s_per_die": round(tokens_per_s_per_die(run, total), 2),
        "assumed": {
            "prompt_tokens": round(run.lengths.prompt, 1),
            "response_tokens": round(run.lengths.mean_of_longest(), 1),
            "dp_sync": workload.dp_sync,
            "engine_ratio": run.engine_ratio,
        },
        "constants": {**vars(FITTED), "dp_sync_s": DP_SYNC_S, "empty_cache_s_per_byte": EMPTY_CACHE_S_PER_BYTE},
        "calibration": errors(),
    }


def direct_traffic(
    blocks: Sequence[Block], train: ParallelLayout, bucket_bytes: int
) -> tuple[SyncTraffic, dict[str, int]]:
    """Our weight sync without a plan of routes, and {received_mean_bytes}.

    What must arrive is exact; what a rank sends is its stage's mean, which routes miss by 0.1 % (docs/weight-sync.md).
    """
    received, sent = [0] * train.world_size, defaultdict(int)
    for block in blocks:
        missing, size = set(block.receivers).difference(block.holders), block.raw_bytes
        for rank in missing:
            received[rank] += size
        sent[train.coordinates(block.holders[0]).pp] += size * len(missing)
    busiest = max(sent.values(), default=0) * train.pp / train.world_size
    most = max(received)
    traffic = SyncTraffic(most, busiest, math.ceil(max(most, busiest) / bucket_bytes))
    return traffic, {"received_mean_bytes": sum(received) // len(received)}


def offload_of(config: DictConfig, rows: Collection[str]) -> tuple[Offload, int]:
    """(copies and releases of the die with the most training weights, bytes of its KV cache)."""
    setting, schedule, stays = run_memory(config, rows)
    setting, train = replace(setting, bucket_bytes=config.recipe.reshard.bucket_bytes), setting.train
    model, library = setting.inventory.model, setting.train_library
    fullest = max(range(train.pp), key=lambda stage: sum(stage_elements(model, train, stage, library)))
    sizes = group_bytes(setting, fullest * train.world_size // train.pp)
    moments = moments_of(schedule, setting, sizes, stays)
    moved = Offload(
        sum(moment.to_device_bytes for moment in moments.values()),
        sum(moment.to_host_bytes for moment in moments.values()),
        released_bytes(moments, sizes),
        sum(moment.empty_cache_calls for moment in moments.values()),
    )
    return moved, sizes["kv_cache"]


def released_bytes(moments: Mapping[str, Moment], sizes: Mapping[str, int]) -> int:
    """Bytes that the allocator returns to the device in a step: freed and not taken again before empty_cache.

    Memory of vLLM's sleep mode counts too, which is unmapped instead; its seconds are not published.
    """
    cached = total = 0
    for _ in range(2):  # the second step finds what the first one left
        total = 0
        for move in (move for moment in moments.values() for move in moment.moves):
            if move.verb == "empty_cache":
                total, cached = total + cached, 0
            elif move.verb in ("offload", "free"):
                cached += sizes[move.group]
            else:
                cached = max(0, cached - sizes[move.group])
    return total


def ports(config: DictConfig) -> dict[str, list[int]] | None:
    """{who: [first, last]} that every node needs free on platform npu."""
    if not as_npu(config.recipe.platform):
        return None
    base = config.recipe.hccl.base_port
    first, last = hccl.host_ports(config)
    return {
        "HCCL_IF_BASE_PORT": [base, first - 1],
        "HCCL_HOST_SOCKET_PORT_RANGE": [first, last],
        "all": [base, base + HCCL_PORTS - 1],
    }
