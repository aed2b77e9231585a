"""Apply the step model to a configuration: its inputs, seconds by phase, traffic, ports; no torch."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import DTYPE_BYTES
from verl_patches.layout.model_folder import QUANTIZATION, read_json_object
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.phases import STEP_PHASES
from verl_patches.memory.schedule import PhaseMemory
from verl_patches.plan.calibration import CONSTANTS, MEAN_PROMPT, calibration_errors, likely_range
from verl_patches.plan.expected import group_bytes, phase_moments
from verl_patches.plan.memory_plan import RunMemory, recomputation
from verl_patches.plan.step_model import (
    Constants,
    Lengths,
    Offload,
    StepInput,
    SyncTraffic,
    direct_sync_bound,
    driver_bytes,
    rollout_bytes,
    stage_elements,
    step_time,
    tokens_per_s_per_die,
    train_bytes,
    verl_sync,
)
from verl_patches.reshard.blocks import Block, run_blocks
from verl_patches.run import hccl
from verl_patches.spec import RunSpec
from verl_patches.step.batches.limits import trainer_bytes

DISK_GB_S = 10.0  # rate of a shared file system; assumed
RESPONSE_TOKENS = 1000.0  # mean of responses that end by themselves, before the cut; assumed


@dataclass(frozen=True)
class Workload:
    """Describe the workload that a configuration does not give: mean tokens of prompts and responses.

    prompt_tokens: None is the published run's mean. response_tokens: mean of responses that end by themselves, None is
    RESPONSE_TOKENS; it is not read where all have full length.
    lengths, expert_load: the runs, if any, that `recorded` and `loads` were read from. recorded: tokens of each prompt,
    and of each response. loads: tokens of the busiest rank's experts over the mean, in training and in rollout, not
    read where routing is balanced. disk_gb_s: rate of the file system with weights and checkpoints, to or from all
    nodes together. measured: constants of the step model that a bring-up has measured, in the place of quoted ones.
    """

    prompt_tokens: float | None = None
    response_tokens: float | None = None
    lengths: str | None = None
    recorded: tuple[Sequence[int], Sequence[int]] = ((), ())
    expert_load: str | None = None
    loads: tuple[float, float] = (CONSTANTS.train_load, 1.0)
    disk_gb_s: float = DISK_GB_S
    measured: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self):
        if self.lengths and (self.prompt_tokens or self.response_tokens):
            raise ConfigError("--lengths sets both lengths: leave out --prompt-tokens and --response-tokens")
        for name in ("prompt_tokens", "response_tokens", "disk_gb_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected a number above 0")

    @property
    def constants(self) -> Constants:
        """Return the constants of the step model: quoted, or measured."""
        return replace(CONSTANTS, **self.measured)

    @property
    def option(self) -> tuple[str, ...]:
        """Return the words of the command line that give it; none for the defaults."""
        given: dict[str, Any] = {"--prompt-tokens": self.prompt_tokens, "--response-tokens": self.response_tokens}
        given |= {"--lengths": self.lengths, "--expert-load": self.expert_load}
        given["--disk-gb-s"] = None if self.disk_gb_s == DISK_GB_S else self.disk_gb_s
        return tuple(word for name, value in given.items() if value is not None for word in (name, str(value)))


def step_input(
    run: RunSpec,
    workload: Workload = Workload(),
    sync: SyncTraffic | None = None,
    offload: Offload | None = None,
    kv_bytes: float | None = None,
) -> StepInput:
    """Return the step model's input of a run; without `sync` it has the weight sync's upper bound, or verl's own."""
    recipe, rows, data, section = run.recipe, run.rows, run.verl.data, run.verl.actor_rollout_ref
    actor, rollout = section.actor, section.rollout
    train, train_batch, n = run.train, data.train_batch_size, rollout.n
    lengths = _run_lengths(run, workload)
    length = lengths.prompt + lengths.mean_of_longest()
    graphs = (run.graph_sizes or (run.max_num_seqs,)) if run.graphs else ()
    micro = actor.ppo_micro_batch_size_per_gpu
    if actor.use_dynamic_bsz or micro is None:
        micro = max(1, int(actor.ppo_max_token_len_per_gpu * train.cp // length))
    critic = run.critic
    step = StepInput(
        model=run.trained_model,
        train=train,
        rollout=run.rollout,
        lengths=lengths,
        prompts=train_batch,
        samples=n,
        micro_batch=micro,
        ref_micro_batch=(section.ref.log_prob_micro_batch_size_per_gpu or micro) if run.uses_reference else None,
        old_micro_batch=None if recipe.train.skip_old_log_prob else rollout.log_prob_micro_batch_size_per_gpu or micro,
        critic_micro_batch=None if critic is None else critic.ppo_micro_batch_size_per_gpu,
        reward_models=len(run.reward_models),
        reward_micro_batch=run.verl.reward_model.micro_batch_size_per_gpu or 1,
        mini_batches=max(1, train_batch // actor.ppo_mini_batch_size),
        epochs=actor.ppo_epochs,
        recompute_layers=recomputation(run)[0],
        moe_alltoall_overlap_comm=recipe.train.moe_alltoall_overlap_comm,
        swap_optimizer=recipe.train.swap_optimizer or actor.megatron.optimizer_offload,
        balanced_lengths=run.verl.trainer.balance_batch,
        tensor_cache=recipe.tensor_cache.enabled,
        copies=1 if "dispatch.put_once" in rows else train.tp * train.pp,
        max_prompt_length=data.max_prompt_length,
        max_num_seqs=run.max_num_seqs,
        graph_sizes=graphs,
        token_budget=rollout.max_num_batched_tokens,
        prefix_caching=recipe.rollout.ascend.prefix_caching,
        rollout_library=run.rollout_library,
        dp_syncs=1 if "rollout.ascend_dp_sync" in rows else 2,
        expert_load=(
            1.0 if recipe.train.balanced_routing else workload.loads[0],
            1.0 if recipe.rollout.balanced_routing else workload.loads[1],
        ),
        kv_bytes=kv_bytes,
        sampled=run.samples,
        actor=run.trains_actor,
        offload=offload or Offload(),
    )
    if sync is None:
        direct = direct_sync_bound(step.model, step, recipe.reshard.bucket_bytes)
        sync = direct if "reshard.direct" in rows else verl_sync(step.model, train)
    return replace(step, sync=sync)


def _run_lengths(run: RunSpec, workload: Workload) -> Lengths:
    data, forced = run.verl.data, run.verl.actor_rollout_ref.rollout.ignore_eos
    prompts, responses = workload.recorded
    prompt = MEAN_PROMPT if workload.prompt_tokens is None else workload.prompt_tokens
    prompt = min(data.max_prompt_length, sum(prompts) / len(prompts) if prompts else prompt)
    mean = RESPONSE_TOKENS if workload.response_tokens is None else workload.response_tokens
    if forced or responses:
        return Lengths(prompt, data.max_response_length, recorded=() if forced else tuple(responses))
    return Lengths(prompt, data.max_response_length, mean)


def mean_tokens(run: RunSpec, workload: Workload) -> float:
    """Return the mean tokens of a prompt with its response."""
    lengths = _run_lengths(run, workload)
    return lengths.prompt + lengths.mean_of_longest()


def step_sections(run: RunSpec, memory: RunMemory, workload: Workload) -> dict[str, Any]:
    """Return {step, disk, traffic, ports} of a plan, as JSON-ready data; all figures are modelled.

    step: None on a CPU and on machines for which no published run gives seconds. Raise ConfigError where layouts or the
    weight sync do not fit.
    """
    sync = verl_sync(run.trained_model, run.train)
    if not run.samples:
        sync = SyncTraffic(0, 0, 0)
    elif "reshard.direct" in run.rows:
        sync = direct_traffic(run_blocks(run), run.train, run.recipe.reshard.bucket_bytes)
    offload, kv_bytes = run_offload(memory, run.recipe.reshard.bucket_bytes)
    model = step_input(run, workload, sync, offload, kv_bytes or None)
    wire = {"received_bytes": round(sync.received_bytes), "sent_bytes": round(sync.sent_bytes)}
    return {
        "step": step_figures(model, workload) if run.as_npu and run.hardware.timed else None,
        "disk": disk_figures(run, workload.disk_gb_s),
        "traffic": {
            "weight_sync": {**wire, "collectives": sync.collectives},
            "sent": sent_bytes(model),
            "dispatch_bytes": dispatch_bytes(model, send_back=run.verl.algorithm.use_kl_in_reward),
        },
        "ports": hccl.node_ports(run) if run.as_npu else None,
    }


def sent_bytes(run: StepInput) -> dict[str, int]:
    """Return {train, rollout, weight_sync}: bytes that the busiest die of each sends to others in a step."""
    sync = run.sync or verl_sync(run.model, run.train)
    sampled = {"rollout": rollout_bytes(run), "weight_sync": sync.sent_bytes} if run.sampled else {}
    return {side: round(size) for side, size in {"train": train_bytes(run), **sampled}.items()}


def dispatch_bytes(run: StepInput, send_back: bool) -> dict[str, int]:
    """Return {stage: bytes} that the trainer sends or receives in a step; `send_back`: log-probs, for KL in reward."""
    whole = replace(run, tensor_cache=False)  # value models get the trainer's batch even with the cache
    absent = [] if run.old_micro_batch else ["log_prob", "old_log_prob"]
    absent += [] if run.ref_micro_batch else ["ref"]
    if run.tensor_cache:
        tokens = run.prompts * run.lengths.prompt, run.responses * run.lengths.mean_of_longest()
        options = {"send_back": send_back, "per_token": run.critic_micro_batch is not None}
        columns = trainer_bytes(run.prompts, run.responses, *tokens, **options)
        sizes = {stage: float(sum(each.values())) for stage, each in columns.items() if each}
    else:
        sizes = {"old_log_prob": driver_bytes(run, 0), "ref": driver_bytes(run, 0), "update": driver_bytes(run, 3)}
    if run.reward_models:
        sizes["rm_scores"] = driver_bytes(whole, 0)
    if run.critic_micro_batch:
        sizes |= {"values": driver_bytes(whole, 3), "update_critic": driver_bytes(whole, 6)}
    return {stage: round(size) for stage, size in sizes.items() if stage not in absent}


def step_figures(run: StepInput, workload: Workload) -> dict[str, Any]:
    """Return seconds by phase, their sum, tokens/s of a die, assumptions, the model's error on each published row.

    Each has its `likely_range` beside it. With measured constants each phase, and the sum, has the seconds by the
    quoted ones too.
    """
    constants, quoted = workload.constants, step_time(run, CONSTANTS) if workload.measured else {}
    seconds = step_time(run, constants)
    total, beside = sum(seconds.values()), {name: {"quoted_s": round(s, 3)} for name, s in quoted.items()}
    absent = [] if run.critic_micro_batch else [phase.schedule_name for phase in STEP_PHASES if phase.critic]
    low, high = likely_range("total", total)
    return {
        "modelled": True,
        "phases": [
            {
                "phase": phase,
                "seconds": round(s, 3),
                "range_s": [round(bound, 3) for bound in likely_range(phase, s)],
                **beside.get(phase, {}),
            }
            for phase, s in seconds.items()
            if phase not in absent
        ],
        "total_s": round(total, 2),
        "total_range_s": [round(low, 2), round(high, 2)],
        **({"quoted_total_s": round(sum(quoted.values()), 2)} if quoted else {}),
        "tokens_per_s_per_die": round(tokens_per_s_per_die(run, total), 2),
        "tokens_per_s_per_die_range": [round(tokens_per_s_per_die(run, bound), 2) for bound in (high, low)],
        "assumed": {
            "prompt_tokens": round(run.lengths.prompt, 1),
            "response_tokens": round(run.lengths.mean_of_longest(), 1),
            "lengths": _lengths_text(run.lengths, workload),
            "expert_load": dict(zip(("train", "rollout"), run.expert_load, strict=True)),
        },
        "calibration": calibration_errors(),
    }


def _lengths_text(lengths: Lengths, workload: Workload) -> str:
    if lengths.recorded:
        return f"{len(lengths.recorded)} recorded of {workload.lengths}"
    return "all at the limit" if lengths.mean is None else f"lognormal, cv {lengths.cv:g}"


def direct_traffic(blocks: Sequence[Block], train: ParallelLayout, bucket_bytes: int) -> SyncTraffic:
    """Return the traffic of our weight sync, whose routes are not planned here.

    The bytes that must arrive are exact; sent bytes are the mean over a pipeline stage, from which those of planned
    routes differ by 0.1 % (docs/the-step.md).
    """
    received, sent = [0] * train.world_size, defaultdict[int, int](int)
    for block in blocks:
        missing, size = set(block.receivers).difference(block.holders), block.raw_bytes
        for rank in missing:
            received[rank] += size
        sent[train.coordinates(block.holders[0]).pp] += size * len(missing)
    busiest, most = max(sent.values(), default=0) * train.pp / train.world_size, max(received)
    return SyncTraffic(most, busiest, math.ceil(max(most, busiest) / bucket_bytes))


def disk_figures(run: RunSpec, gb_s: float) -> dict[str, Any]:
    """Return {gb_s, parts: [{part, bytes, seconds}]} of a start's reads and a save's writes, at `gb_s` of all nodes.

    A first start reads the weights that each rank holds, for the actor and for a critic; half the bytes where the
    model's config.json is here and says FP8. A save writes weights and optimizer's states once. A resumed start reads
    the weights that each rank holds, and the states once.
    """
    train, library, parts = run.train, run.train_library, []
    size = DTYPE_BYTES[run.torch_dtype]
    beside = 0 if size == 4 else size  # bytes of a weight beside the optimizer's states, which hold fp32 ones
    elements = sum(sum(stage_elements(run.model, train, stage, library)) for stage in range(train.pp))
    total = elements * train.world_size / train.pp
    if run.reads_weights:
        file = run.model_folder / "config.json"
        quantized = file.exists() and QUANTIZATION in read_json_object(file)
        parts.append(("first start", (1 if quantized else size) * total * len(run.trained_sections)))
    if run.verl.trainer.save_freq > 0:
        weight_bytes, state_bytes = run.checkpoint_bytes
        parts.append(("save", weight_bytes + state_bytes))
        parts.append(("load", beside * len(run.trained_sections) * total + state_bytes))
    rows = [{"part": part, "bytes": round(of), "seconds": round(of / gb_s / 1e9, 1)} for part, of in parts]
    return {"gb_s": gb_s, "parts": rows}


def run_offload(memory: RunMemory, bucket_bytes: int) -> tuple[Offload, int]:
    """Return the `Offload` of a step on the die with the most training weights, and the bytes of its KV cache."""
    setting, schedule, unmoved_groups = memory
    setting, train = replace(setting, bucket_bytes=bucket_bytes), setting.train
    model, library = setting.inventory.model, setting.train_library
    fullest = max(range(train.pp), key=lambda stage: sum(stage_elements(model, train, stage, library)))
    sizes = group_bytes(setting, fullest * train.world_size // train.pp)
    moments = phase_moments(schedule, setting, sizes, unmoved_groups)
    moved = Offload(
        sum(moment.to_device_bytes for moment in moments.values()),
        sum(moment.to_host_bytes for moment in moments.values()),
        released_bytes(moments, sizes),
        sum(moment.empty_cache_calls for moment in moments.values()),
    )
    return moved, sizes["kv_cache"]


def released_bytes(moments: Mapping[str, PhaseMemory], sizes: Mapping[str, int]) -> int:
    """Return the bytes that the allocator returns to the device in a step: freed and not reused before empty_cache.

    Memory of vLLM's sleep mode, which is unmapped instead, counts too; its seconds are not published.
    """
    cached = total = 0
    for _ in range(2):  # the second step starts with what the first one left
        total = 0
        for move in [move for moment in moments.values() for move in moment.moves]:
            if move.verb == "empty_cache":
                total, cached = total + cached, 0
            elif move.verb in ("offload", "free"):
                cached += sizes[move.group]
            else:
                cached = max(0, cached - sizes[move.group])
    return total
