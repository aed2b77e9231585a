"""Model the seconds of one GRPO step by phase, from sizes, layouts and a few constants; no torch, no measurement.

Every phase is a sum of terms in seconds. FLOPs and bytes follow from the model's shape and the layouts; a rate is a
figure of an A3 die times an efficiency. Letters: T tokens of a micro batch on one TP group, H hidden, M
micro batches of a replica, b responses that decode on a replica, c tokens of context.

values, update_critic   as ref and update, of a critic; its head is taken for the vocabulary's, an upper bound
rollout      steps x decode + prefill, until the longest response ends; b falls as responses end. All replicas of an
             instance take as long as the one with the most left (binomial, as lengths are independent). A decode step:
             weights of the die / memory + b x c x KV bytes / memory + b x 2 FLOPs x active parameters / TP / compute
             + exchange of experts and TP's all-reduces / network + layers x decode_layer_s + engine_step_s
             + syncs of the DP ranks: 2, or 1 with row rollout.ascend_dp_sync. The two are
             vllm_ascend.worker.model_runner_v1.NPUModelRunner._get_forward_metadata_across_dp and
             vllm_ascend.patch.platform.patch_common.patch_distributed.ascend_has_unfinished_dp
ref, old_log_prob   forward pipeline, and the batch's bytes through the driver where the tensor cache is off
update       forward + 2 x forward for backward + forward of the recomputed layers, as a pipeline; gradient and
             parameter exchange of DP; optimizer, with its copies over the host link where it is swapped
pipeline     sum of all stages + (M - 1) x slowest stage (1F1B; Narayanan et al. 2021, section 2.2); uneven stages keep
             their own layers, the last one the head and the fp32 log-softmax, with V virtual stages the fill is 1/V
layer        its FLOPs (layout/flops.py) / TP / compute;
             sequence parallel's all-gathers and reduce-scatters 4 (TP-1)/TP x T x H, experts' all-to-alls
             2 x T/TP x top-k x H x (EP-1)/EP, bf16, / network; never below EAGER_LAYER_S of kernel launches
reshard      bytes that the busiest die sends or receives / network + packing / memory + collectives x collective_s
offload      bytes to and from the host / host link + released bytes x EMPTY_CACHE_S_PER_BYTE + calls x empty_cache_s
reward, advantage   response tokens x seconds a token, on the driver

Efficiencies of 0.7 (compute of decode), 0.6 (memory), 0.7 (network) are taken as given; each of `Constants` is fixed by
one row of plan/calibration.py. FLOPs and bytes of experts are those of the busiest rank, `expert_load` times the
mean: 1, balanced, in rollout, train_load in training, unless a run has counted them. docs/plan.md has the limits.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from verl_patches.layout.flops import PEAK_FLOPS_PER_S, LayerSizes, forward_flops, layer_flops, layer_kinds, layer_sizes
from verl_patches.layout.inventory import DTYPE_BYTES, ModelShape
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.phases import STEP_PHASES
from verl_patches.layout.sharding import GRAD_BYTES, LIBRARIES, OPTIMIZER_BYTES
from verl_patches.plan.activations import PerStage, recomputed_layers
from verl_patches.step.batches.batch_plan import expert_group_replicas

# Rates of one A3 die: FLOP/s in bf16, bytes/s of its memory, of the network one way, of the link to its host. The
# last is not published: 25 GB/s is the lowest of the range 25, 40, 64.
FLOPS_PER_S, MEMORY_BYTES_PER_S = PEAK_FLOPS_PER_S["npu"], 1.6 * 2**40
NETWORK_BYTES_PER_S, HOST_LINK_BYTES_PER_S = 196e9, 25e9
COMPUTE_EFFICIENCY, MEMORY_EFFICIENCY, NETWORK_EFFICIENCY = 0.7, 0.6, 0.7  # the first for decode and prefill
# A node's dies share its memory: four Kunpeng CPUs (arXiv 2506.12708), taken as the slowest, 8 channels DDR4-2933 each.
NODE_MEMORY_BYTES_PER_S, NODE_DIES = 4 * 8 * 2.933e9 * 8, 16
HOST_BYTES_PER_S = min(HOST_LINK_BYTES_PER_S, NODE_MEMORY_BYTES_PER_S * MEMORY_EFFICIENCY / NODE_DIES)
DP_SYNC_S = {"hccl": 0.003, "gloo": 0.014}  # seconds of one call, quoted
EMPTY_CACHE_S_PER_BYTE = 4 / 26e9  # quoted
EAGER_LAYER_S = 0.0012  # assumed: about 120 kernel launches of 10 us; binds for short micro batches only
HEAD_PASSES = 6  # assumed: reads and writes of the fp32 logits for log-softmax, entropy and their reductions
_SEGMENTS = 64  # steps of the rollout's integral over response tokens
PHASES = tuple(phase.schedule_name for phase in STEP_PHASES)


@dataclass(frozen=True)
class Constants:
    """Hold the fitted constants, each fixed by the one row that plan/calibration.py names.

    train_efficiency: share of the die's FLOP/s that a layer reaches in training. decode_layer_s: seconds of a layer in
    a decode graph that do not depend on the batch, beyond reading its weights. engine_step_s: seconds of a decode step
    outside of the model (scheduler, sampling, output). driver_bytes_per_s: batches through Ray's driver. collective_s:
    seconds of one collective of a weight sync, with its share of Python. empty_cache_s: a call of empty_cache that
    releases nothing. reward_s, advantage_s: seconds of one response token. train_load: tokens of the busiest rank's
    experts over the mean in training, where routing is not balanced and no run has counted it.
    """

    train_efficiency: float
    decode_layer_s: float
    engine_step_s: float
    driver_bytes_per_s: float
    collective_s: float
    empty_cache_s: float
    reward_s: float
    advantage_s: float
    train_load: float


@dataclass(frozen=True)
class Lengths:
    """Hold tokens of prompts (mean) and of responses, which are cut at `longest`.

    Responses are as `recorded`, else lognormal (`mean` before the cut, coefficient of variation `cv`), else `longest`.
    """

    prompt: float
    longest: int
    mean: float | None = None
    cv: float = 0.55
    recorded: tuple[int, ...] = ()  # sorted

    def survival(self, tokens: float) -> float:
        """Return the share of responses that are longer than `tokens`."""
        if tokens >= self.longest:
            return 0.0
        if self.recorded:
            return 1 - bisect.bisect_right(self.recorded, tokens) / len(self.recorded)
        if self.mean is None or tokens <= 0:
            return 1.0
        sigma = math.sqrt(math.log(1 + self.cv**2))
        return 1 - NormalDist(math.log(self.mean) - sigma**2 / 2, sigma).cdf(math.log(tokens))

    def mean_of_longest(self, draws: int = 1) -> float:
        """Return the expected tokens of the longest of `draws` responses; for one draw the mean after the cut."""
        if self.mean is None and not self.recorded:
            return float(self.longest)
        step = self.longest / 512
        return step * sum(1 - (1 - self.survival((i + 0.5) * step)) ** draws for i in range(512))


@dataclass(frozen=True)
class SyncTraffic:
    """Describe the traffic of one weight sync: bytes of the busiest die, in and out, and number of collectives."""

    received_bytes: float
    sent_bytes: float
    collectives: int


@dataclass(frozen=True)
class Offload:
    """Describe a step's copies and releases on the worst die, in bytes, and its calls of empty_cache."""

    to_device_bytes: float = 0
    to_host_bytes: float = 0
    released_bytes: float = 0
    empty_cache_calls: int = 0


@dataclass(frozen=True)
class StepInput:
    """Hold all that the model reads of a run; sizes are of ranks, responses or tokens, or their names say bytes.

    `copies`: how often the trainer sends a sample to its workers where the tensor cache is off: 1, or once for each of
    the TP x PP workers of a replica. `ref_micro_batch`, `old_micro_batch`: None where that pass is left out,
    `critic_micro_batch` without a critic. `reward_micro_batch`: of each reward model. `sampled`: false on fixed data,
    without rollout, weight sync and reward; `actor`: false where the critic alone is trained.
    `graph_sizes`: batch sizes of decode graphs; empty: eager. `rollout_library`: the rules by which the rollout's
    tensors are cut (layout/sharding.py). `dp_syncs`: syncs of the DP ranks in a decode step. `kv_bytes`: bytes of a
    die's KV cache, None: no limit. `expert_load`: tokens of the busiest rank over the mean, in training and in rollout.
    """

    model: ModelShape
    train: ParallelLayout
    rollout: ParallelLayout
    lengths: Lengths
    prompts: int
    samples: int
    micro_batch: int = 1
    ref_micro_batch: int | None = 1
    old_micro_batch: int | None = None
    critic_micro_batch: int | None = None
    reward_models: int = 0
    reward_micro_batch: int = 1
    mini_batches: int = 1
    epochs: int = 1
    recompute_layers: PerStage = 0
    moe_alltoall_overlap_comm: bool = False
    swap_optimizer: bool = False
    balanced_lengths: bool = False
    tensor_cache: bool = False
    copies: int = 1
    max_prompt_length: int = 1024
    max_num_seqs: int = 64
    graph_sizes: tuple[int, ...] = (64,)
    token_budget: int = 1024
    prefix_caching: bool = False
    rollout_library: str = "vllm-ascend"
    dp_sync: str = "hccl"
    dp_syncs: int = 2
    expert_load: tuple[float, float] = (1.0, 1.0)
    kv_bytes: float | None = None
    sampled: bool = True
    actor: bool = True
    sync: SyncTraffic | None = None
    offload: Offload = field(default_factory=Offload)

    @property
    def responses(self) -> int:
        """Return the number of responses of a step."""
        return self.prompts * self.samples


def memory_s(size_bytes: float) -> float:
    """Return the seconds to move bytes through the die's memory."""
    return size_bytes / (MEMORY_BYTES_PER_S * MEMORY_EFFICIENCY)


def network_s(size_bytes: float) -> float:
    """Return the seconds to send or receive bytes."""
    return size_bytes / (NETWORK_BYTES_PER_S * NETWORK_EFFICIENCY)


def compute_s(flops: float, efficiency: float = COMPUTE_EFFICIENCY) -> float:
    """Return the seconds of FLOPs at an efficiency."""
    return flops / (FLOPS_PER_S * efficiency)


@functools.lru_cache(4096)
def stage_elements(model: ModelShape, layout: ParallelLayout, stage: int, library: str) -> tuple[float, float]:
    """Return (dense, routed): the elements of both kinds on a rank of `stage`."""
    dense = routed = 0.0
    for layer in layout.stage_layers(stage, model.num_hidden_layers):
        sizes = layer_sizes(model, model.is_moe(layer), library)
        dense += _dense_elements(sizes, layout.tp, library)
        routed += sizes.expert * model.n_routed_experts / (layout.ep * layout.etp)
    table = model.vocab_size * model.hidden_size / layout.tp
    if stage == 0:
        dense += table  # embedding
    if stage == layout.pp - 1:
        dense += table  # head
    return dense, routed


def _dense_elements(sizes: LayerSizes, tp: int, library: str) -> float:
    """Return the elements of a layer on a TP rank without its routed experts."""
    whole_shared = "shared_expert_gate" in LIBRARIES[library].whole
    return sizes.split / tp + sizes.whole + sizes.shared / (1 if whole_shared else tp)


# training


class _LayerTime(NamedTuple):
    """Hold the seconds of a layer's forward pass: computing, and exposed communication."""

    compute: float
    network: float

    @property
    def forward(self) -> float:
        return max(EAGER_LAYER_S, self.compute + self.network)

    @property
    def backward(self) -> float:
        """Return the seconds of backward: gradients of inputs and of weights, and the same bytes as forward."""
        return max(2 * EAGER_LAYER_S, 2 * self.compute + self.network)


def _layer_s(run: StepInput, moe: bool, tokens: float, length: float, constants: Constants) -> _LayerTime:
    """Return compute and exposed communication of one layer's forward pass on one micro batch, in seconds."""
    model, layout = run.model, run.train
    sizes, efficiency = layer_sizes(model, moe, "vllm"), constants.train_efficiency
    flops = layer_flops(model, moe, tokens, length)
    # dense layers have 0 elements of experts
    flops += 2 * (run.expert_load[0] - 1) * model.num_experts_per_tok * sizes.expert * tokens
    compute = compute_s(flops / layout.tp / layout.cp, efficiency)
    gathered, exchanged = map(network_s, _layer_bytes(run, moe, tokens))
    if run.moe_alltoall_overlap_comm:  # runs behind the shared experts
        behind = compute_s(2 * sizes.shared * tokens / layout.tp / layout.cp, efficiency)
        exchanged = max(0.0, exchanged - behind)
    return _LayerTime(compute, gathered + exchanged)


def _layer_bytes(run: StepInput, moe: bool, tokens: float) -> tuple[float, float]:
    """Return the bytes that a die sends in a layer's forward pass: of TP with context parallelism, and of experts."""
    model, layout = run.model, run.train
    size, exchanged = DTYPE_BYTES[model.torch_dtype], 0.0
    row = model.hidden_size * size * tokens / layout.cp
    gathered = 4 * (layout.tp - 1) / layout.tp * row
    heads = 2 * (model.qk_nope_head_dim + model.qk_rope_head_dim + model.v_head_dim) * model.num_attention_heads
    gathered += (layout.cp - 1) / layout.cp**2 * heads / layout.tp * size * tokens  # Ulysses
    if moe and layout.ep > 1:
        top_k = model.num_experts_per_tok * run.expert_load[0]
        exchanged = 2 * row / layout.tp * top_k * (layout.ep - 1) / layout.ep
    return gathered, exchanged


def pipeline_s(stages: list[float], micro_batches: float, virtual: int = 1) -> float:
    """Return the seconds of 1F1B: the slowest stage works on every micro batch, the others fill the pipeline.

    The fill is 1/virtual of that with virtual stages.
    """
    slowest = max(stages)
    return micro_batches * slowest + (sum(stages) - slowest) / virtual


def stage_s(run: StepInput, micro_batch: int, train: bool, constants: Constants) -> list[float]:
    """Return the seconds of each stage for one micro batch: forward; with `train` backward and recompute too."""
    model, layout = run.model, run.train
    length = padded_length(run, micro_batch)
    tokens = micro_batch * length
    passes = {moe: _layer_s(run, moe, tokens, length, constants) for moe in (False, True)}
    row = model.hidden_size * DTYPE_BYTES[model.torch_dtype] * tokens / layout.tp / layout.cp
    stage_seconds = []
    for stage in range(layout.pp):
        seconds = 0.0
        if layout.pp > 1:
            seconds = network_s(row) * (2 if train else 1)
        for number, layer in enumerate(layout.stage_layers(stage, model.num_hidden_layers)):
            one = passes[model.is_moe(layer)]
            seconds += one.forward
            if train:
                again = number < recomputed_layers(run.recompute_layers, stage) * layout.vpp
                seconds += one.backward + (one.forward if again else 0.0)
        if stage == layout.pp - 1:
            flops = 2 * model.vocab_size * model.hidden_size * tokens / layout.tp / layout.cp
            head = compute_s(flops, constants.train_efficiency)
            logits = memory_s(HEAD_PASSES * 4 * tokens * model.vocab_size / layout.tp / layout.cp)
            seconds += (3 * head + 2 * logits) if train else head + logits
        stage_seconds.append(seconds)
    return stage_seconds


def padded_length(run: StepInput, micro_batch: int) -> float:
    """Return the tokens of a sample as computed, padding included.

    Micro batches run at their longest sample, and all replicas of an expert group at the longest of theirs, unless the
    tensor cache sorts samples by length.
    """
    draws = 1 if run.tensor_cache and run.balanced_lengths else micro_batch * expert_group_replicas(run.train)
    return run.lengths.prompt + run.lengths.mean_of_longest(draws)


def log_prob_s(run: StepInput, micro_batch: int, constants: Constants) -> float:
    """Return the seconds of one forward pass over the batch, and of the batch's way through the driver."""
    batches = run.responses / run.train.dp / micro_batch
    stages = stage_s(run, micro_batch, False, constants)
    return pipeline_s(stages, batches, run.train.vpp) + driver_bytes(run, 0) / constants.driver_bytes_per_s


def update_s(run: StepInput, constants: Constants) -> float:
    """Return the seconds of the update: pipeline, gradients, optimizer, the batch's way through the driver."""
    batches = run.responses / run.train.dp / run.micro_batch / run.mini_batches
    stages = stage_s(run, run.micro_batch, True, constants)
    once = pipeline_s(stages, batches, run.train.vpp) + _optimizer_s(run)
    return run.epochs * run.mini_batches * once + driver_bytes(run, 3) / constants.driver_bytes_per_s


def train_s(run: StepInput, constants: Constants) -> float:
    """Return the seconds of the actor's passes: update, and the log-probs of old policy and reference if needed."""
    sizes = [size for size in (run.old_micro_batch, run.ref_micro_batch) if size]
    return update_s(run, constants) + sum(log_prob_s(run, size, constants) for size in sizes)


def _optimizer_s(run: StepInput) -> float:
    """Return the seconds of an optimizer step.

    Gradients go to their owners, states through memory (and over the host link if swapped), parameters back.
    """
    model, layout = run.model, run.train
    worst = 0.0
    for stage in range(layout.pp):
        dense, routed = stage_elements(model, layout, stage, "mindspeed")
        owned = dense / (layout.dp * layout.cp) + routed / layout.edp
        seconds = network_s(_gradient_bytes(run, stage))
        seconds += memory_s(owned * 2 * OPTIMIZER_BYTES + (dense + routed) * GRAD_BYTES)
        if run.swap_optimizer:
            seconds += 2 * owned * OPTIMIZER_BYTES / HOST_BYTES_PER_S
        worst = max(worst, seconds)
    return worst


def _gradient_bytes(run: StepInput, stage: int) -> float:
    """Return the bytes that a die of `stage` sends of gradients, and of parameters after the optimizer's step."""
    layout, replicas = run.train, run.train.dp * run.train.cp
    dense, routed = stage_elements(run.model, layout, stage, "mindspeed")
    sent = dense * (replicas - 1) / replicas + routed * (layout.edp - 1) / layout.edp
    return sent * (GRAD_BYTES + DTYPE_BYTES[run.model.torch_dtype])


def train_bytes(run: StepInput) -> float:
    """Return the bytes that the busiest die sends in a step's passes and its exchange of gradients and parameters."""
    model, layout, stages = run.model, run.train, []
    tokens = run.responses / layout.dp * padded_length(run, run.micro_batch)
    layer_bytes = {moe: sum(_layer_bytes(run, moe, tokens)) for moe in (False, True)}
    passes = 2 * run.epochs + len([size for size in (run.ref_micro_batch, run.old_micro_batch) if size])
    for stage in range(layout.pp):
        sent = [layer_bytes[model.is_moe(layer)] for layer in layout.stage_layers(stage, model.num_hidden_layers)]
        again = run.epochs * sum(sent[: recomputed_layers(run.recompute_layers, stage)])
        stages.append(passes * sum(sent) + again + run.epochs * run.mini_batches * _gradient_bytes(run, stage))
    return max(stages)


def driver_bytes(run: StepInput, float_columns: int) -> float:
    """Return the bytes that one call to all workers sends through Ray.

    Without the tensor cache these are padded int64 ids, mask, positions, prompts, responses and their mask, and fp32
    columns of responses. With it they are one number a sample, as ids cross once, after generation
    (step/batches/limits.py:trainer_bytes).
    """
    prompt, response = run.max_prompt_length, run.lengths.longest
    if run.tensor_cache:
        return 4 * run.responses
    sample = 8 * (3 * (prompt + response) + prompt + 2 * response) + 4 * response * float_columns
    return sample * run.responses * run.copies


# rollout


def decode_s(run: StepInput, running: float, context: float, tier: float, constants: Constants) -> float:
    """Return the model's seconds in a decode step of `tier` tokens, padded, that reads the KV of `running` requests."""
    model, layout = run.model, run.rollout
    size, layers = DTYPE_BYTES[model.torch_dtype], model.num_hidden_layers
    dense, routed = stage_elements(model, layout, 0, run.rollout_library)
    read = dense + routed - model.vocab_size * model.hidden_size / layout.tp  # without the embedding
    flops = 2 * model.vocab_size * model.hidden_size / layout.tp
    for moe, count in layer_kinds(model):
        sizes = layer_sizes(model, moe, run.rollout_library)
        top_k = model.num_experts_per_tok * run.expert_load[1] if moe else 0
        dense = _dense_elements(sizes, layout.tp, run.rollout_library)
        flops += 2 * count * (dense + top_k * sizes.expert / layout.tp)
    kv = model.kv_bytes * context * running
    latency = constants.decode_layer_s if run.graph_sizes else max(EAGER_LAYER_S, constants.decode_layer_s)
    seconds = memory_s(read * size + kv) + compute_s(flops * tier) + network_s(_token_bytes(run) * tier)
    return seconds + layers * latency


def _token_bytes(run: StepInput) -> float:
    """Return the bytes that a die of the rollout sends for one token of its replica."""
    model, layout, sent = run.model, run.rollout, 0.0
    reduced = 4 * (layout.tp - 1) / layout.tp  # two all-reduces
    for moe, count in layer_kinds(model):
        top_k = model.num_experts_per_tok * run.expert_load[1] if moe else 0
        exchanged = 2 * top_k / layout.tp * (layout.ep - 1) / layout.ep
        sent += count * model.hidden_size * DTYPE_BYTES[model.torch_dtype] * (reduced + exchanged)
    return sent


def rollout_bytes(run: StepInput) -> float:
    """Return the bytes that a die sends for the tokens of its replica in a step."""
    tokens = run.responses * (run.lengths.prompt + run.lengths.mean_of_longest())
    return tokens / (run.rollout.world_size / run.rollout.tp) * _token_bytes(run)


def rollout_s(run: StepInput, constants: Constants) -> float:
    """Return the seconds until the longest response of the batch ends."""
    layout, lengths = run.rollout, run.lengths
    replica = run.responses / (layout.world_size / layout.tp)  # layouts have pp 1 here
    mean, last = lengths.mean_of_longest(), lengths.mean_of_longest(run.responses)
    sequences = min(run.max_num_seqs, replica)
    if run.kv_bytes is not None:  # as many as the cache holds, at the mean length
        sequences = min(sequences, run.kv_bytes / run.model.kv_bytes / (lengths.prompt + mean))
    sequences = max(1.0, sequences)
    syncs = run.dp_syncs * DP_SYNC_S[run.dp_sync] if layout.dp > layout.edp else 0.0
    fixed = constants.engine_step_s + syncs

    def step(running: float, context: float) -> float:
        tier = next((size for size in sorted(run.graph_sizes) if size >= running), running)
        return decode_s(run, running, context, tier, constants) + fixed

    seconds = _prefill_s(run, replica, constants)
    if replica > sequences:  # a finished response makes room for a waiting one
        seconds += (replica - sequences) / sequences * mean * step(sequences, lengths.prompt + mean / 2)
    width = last / _SEGMENTS
    at = (np.arange(_SEGMENTS) + 0.5) * width
    fullest = fullest_replica(layout.dp // layout.edp, sequences, [lengths.survival(tokens) for tokens in at])
    for tokens, most in zip(at.tolist(), fullest, strict=True):
        seconds += width * step(most, lengths.prompt + tokens)
    return seconds


def fullest_replica(replicas: int, sequences: float, survival: Sequence[float]) -> list[float]:
    """Return, for each probability in `survival`, how many responses run on the fullest of `replicas`: expected, >= 1.

    Each of a replica's `sequences` responses still runs with that probability.
    """
    count = max(1, round(sequences))
    counts = np.arange(count + 1)
    chance = np.clip(np.asarray(survival)[:, None], 1e-15, 1 - 1e-15)
    ways = math.lgamma(count + 1) - np.array([math.lgamma(k + 1) + math.lgamma(count - k + 1) for k in counts])
    chances = np.exp(ways + counts * np.log(chance) + (count - counts) * np.log1p(-chance))  # [segments, count + 1]
    below = chances.cumsum(1)
    most = (1 - np.minimum(below[:, :-1], 1) ** replicas).sum(1)
    return np.maximum(most * sequences / count, 1.0).tolist()


def _prefill_s(run: StepInput, replica: float, constants: Constants) -> float:
    """Return the seconds of a replica's eager prefill, in pieces of the token budget that each read the weights."""
    model, layout = run.model, run.rollout
    tokens = replica * run.lengths.prompt / (run.samples if run.prefix_caching else 1)
    pieces = math.ceil(tokens / run.token_budget)
    dense, routed = stage_elements(model, layout, 0, run.rollout_library)
    read = memory_s((dense + routed) * DTYPE_BYTES[model.torch_dtype])
    flops = forward_flops(model, tokens / max(1, pieces), run.lengths.prompt) / layout.tp
    one = max(model.num_hidden_layers * EAGER_LAYER_S, read + compute_s(flops)) + constants.engine_step_s
    return pieces * one


def verl_sync(model: ModelShape, train: ParallelLayout) -> SyncTraffic:
    """Return the traffic of verl's own sync at the a3 pin.

    Every rank receives its EP part of all stages' experts, and all other tensors: 75 GB at TP4 PP8 EP32, where 73.9 GB
    and about 3,100 collectives are quoted. The collectives are, for each MoE layer, gate, up and down of the local
    experts along PP and then to vLLM's ranks, and five tensors of each layer (assumed).
    """
    size, moe = DTYPE_BYTES[model.torch_dtype], layer_kinds(model)[1][1]
    dense = sum(count * layer_sizes(model, is_moe, "mindspeed").dense for is_moe, count in layer_kinds(model))
    dense += 2 * model.vocab_size * model.hidden_size
    experts = moe * model.n_routed_experts * layer_sizes(model, True, "mindspeed").expert
    received = size * (experts / train.ep + dense)
    local = model.n_routed_experts / train.ep
    return SyncTraffic(received, received, round(moe * local * 6 + model.num_hidden_layers * 5))


def direct_sync_bound(model: ModelShape, run: StepInput, bucket_bytes: int) -> SyncTraffic:
    """Return an upper bound of our sync's traffic that needs no plan: every die receives all weights that it serves."""
    dense, routed = stage_elements(model, run.rollout, 0, run.rollout_library)
    served = (dense + routed) * DTYPE_BYTES[model.torch_dtype]
    busiest = max(len(run.train.stage_layers(stage, model.num_hidden_layers)) for stage in range(run.train.pp))
    sent = served * busiest * run.train.pp / model.num_hidden_layers
    return SyncTraffic(served, sent, math.ceil(max(served, sent) / bucket_bytes))


def reshard_s(sync: SyncTraffic, constants: Constants) -> float:
    """Return the seconds of one weight sync; packing reads and writes what is sent, unpacking what is received."""
    wire = network_s(max(sync.received_bytes, sync.sent_bytes))
    packed = memory_s(2 * (sync.received_bytes + sync.sent_bytes))
    return wire + packed + sync.collectives * constants.collective_s


def offload_s(moved: Offload, constants: Constants) -> float:
    """Return the seconds of a step's copies between host and device, and of returning cached blocks."""
    copied = (moved.to_device_bytes + moved.to_host_bytes) / HOST_BYTES_PER_S
    return copied + moved.released_bytes * EMPTY_CACHE_S_PER_BYTE + moved.empty_cache_calls * constants.empty_cache_s


def step_time(run: StepInput, constants: Constants) -> dict[str, float]:
    """Return {phase: modelled seconds} of a step; phases that the run leaves out are 0."""
    tokens = run.responses * run.lengths.mean_of_longest()
    passes = {"old_log_prob": run.old_micro_batch, "ref": run.ref_micro_batch}
    whole = replace(run, tensor_cache=False)  # value models get the trainer's batch even with the cache
    critic = replace(whole, micro_batch=run.critic_micro_batch) if run.critic_micro_batch else None
    scores_s = log_prob_s(whole, run.reward_micro_batch, constants) if run.reward_models else 0.0
    sync = run.sync or verl_sync(run.model, run.train)
    return {
        "rollout": rollout_s(run, constants) if run.sampled else 0.0,
        **{name: log_prob_s(run, size, constants) if size else 0.0 for name, size in passes.items()},
        "reward": tokens * constants.reward_s + run.reward_models * scores_s if run.sampled else 0.0,
        "advantage": tokens * constants.advantage_s,
        "values": log_prob_s(critic, critic.micro_batch, constants) if critic else 0.0,
        "update_critic": update_s(critic, constants) if critic else 0.0,
        "update": update_s(run, constants) if run.actor else 0.0,
        "reshard": reshard_s(sync, constants) if run.sampled else 0.0,
        "offload": offload_s(run.offload, constants),
    }


def tokens_per_s_per_die(run: StepInput, seconds: float) -> float:
    """Return the tokens of prompts and responses over seconds and dies, as verl's perf/throughput counts them."""
    tokens = run.responses * (run.lengths.prompt + run.lengths.mean_of_longest())
    return tokens / seconds / run.train.world_size
