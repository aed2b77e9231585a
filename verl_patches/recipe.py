"""The typed `recipe:` section: the settings of a run that verl's own configuration does not have.

Hydra merges it as a dataclass schema, so an unknown key is refused by name. A key belongs here only if some code acts
on it. `RunSpec.recipe` (spec.py) holds the section of a run.
docs/configuration.md is generated from the docstrings: each key is described as "key: text" or "key, key: text".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from verl_patches.layout.phases import MEMORY_PHASES
from verl_patches.patching.spec import DRIFT_POLICIES, LINES, NO_SKIP, PLATFORMS
from verl_patches.platform.npu.machine import HARDWARE
from verl_patches.values import (
    Count,
    Decay,
    Dotted,
    Factor,
    Name,
    Natural,
    NotNegative,
    Port,
    Positive,
    RayAddress,
    Share,
    Text,
    types_of,
)

VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
HCCL_PORTS = 16 + 128  # of each node: HCCL_IF_BASE_PORT takes 16, HCCL_HOST_SOCKET_PORT_RANGE gets the others

ON_CONTROLLER = ("reward", "advantage")  # phases in which workers do nothing
PROFILED = tuple(phase for phase in MEMORY_PHASES if phase not in ON_CONTROLLER)


def one_of(*words: str, note: str = "") -> Any:
    """Return the bound of a text that is one of `words`, for `Annotated[str, one_of(...)]`; errors add the `note`."""
    expected = f"one of {', '.join(words)}"
    return Field(pattern=f"^({'|'.join(words)})$", description=f"{expected} ({note})" if note else expected)


_HcclPort = Annotated[int, Field(ge=1024, le=65536 - HCCL_PORTS)]
_Pattern = Annotated[str, Field(pattern=r"^[+-].", description="+row.id or -row.id")]


@dataclass
class Train:
    """The training layout and engine, beyond verl's megatron section.

    layers_per_stage: number of layers of each pipeline stage in model order; null splits them evenly.
    expert_split: what verl's expert sizes mean. etp takes expert_tensor_parallel_size as it is; tp_extend_ep splits
    whole experts over TP x EP ranks, which expert_model_parallel_size counts (MindSpeed's moe_tp_extend_ep).
    skip_old_log_prob: the update uses its own log-probs as the old ones, and the actor's separate pass for them is
    left out. Refused unless the update is one mini batch and one epoch (step/log_probs/on_policy.py).
    importance_ratio: what the update clips: the ratio of each token's new and old probability, or that of its sequence,
    by their geometric mean (GSPO). sequence needs loss_agg_mode=seq-mean-token-mean (step/log_probs/on_policy.py).
    routing_replay: R2 records the routed experts of every token in the actor's pass for old log-probs, and the update
    selects them again (step/replay/routing_replay.py); null: each pass routes by itself.
    max_skipped_steps: the run ends at this many optimizer steps in a row that were skipped because a gradient is NaN
    or infinite (worker/step_guard.py).

    The other keys are for line a3; model/mindspeed/arguments.py maps each to an engine argument. Line pypi refuses
    values other than the defaults.

    swap_optimizer: keep optimizer states on the host and bring them to the device in pieces of whole tensors during
    the update (MindSpeed's swap_optimizer).
    swap_optimizer_times: a piece holds at most 1/swap_optimizer_times of the states, or one tensor.
    fused_rmsnorm, fused_swiglu, fused_rope, fused_permute: MindSpeed's fused kernel of that name.
    fused_linear_wgrad, fused_expert_wgrad: add weight gradients of linear layers, or of experts, to the fp32 gradients
    inside the matrix product's kernel.
    unpadded_attention: pass attention values of v_head_dim as they are, instead of padding query, key and value to 256
    (at 671B).
    alltoall_overlap: overlap the experts' exchange with computation.
    grad_overlap: reduce gradients in the backward pass of the last micro batch, bucket by bucket, instead of after it.
    Only the first pipeline stage has several buckets.
    grad_bucket_parameters: parameters of a bucket; null is Megatron's size, 40 million, or a million for each
    data-parallel rank if that is more.
    collective_timeout_minutes: time limit of a training collective.
    router_bias_update_rate: step size of the router's correction bias, towards experts with few tokens of the update;
    0 leaves the biases unchanged. No auxiliary loss is used.
    balanced_routing: send equally many tokens to every expert, whatever the router says. For speed runs only.
    adam_beta1, adam_beta2, adam_eps: Adam's parameters; the defaults are those of verl and Megatron.
    """

    layers_per_stage: list[Count] | None = None
    expert_split: Annotated[str, one_of("etp", "tp_extend_ep")] = "etp"
    skip_old_log_prob: bool = False
    importance_ratio: Annotated[str, one_of("token", "sequence")] = "token"
    routing_replay: Annotated[str, Field(pattern="^R2$", description="R2")] | None = None
    swap_optimizer: bool = False
    swap_optimizer_times: Count = 16
    max_skipped_steps: Count = 3
    fused_rmsnorm: bool = True
    fused_swiglu: bool = True
    fused_rope: bool = True
    fused_permute: bool = True
    fused_linear_wgrad: bool = False
    fused_expert_wgrad: bool = False
    unpadded_attention: bool = False
    alltoall_overlap: bool = False
    grad_overlap: bool = False
    grad_bucket_parameters: Count | None = None
    collective_timeout_minutes: Count = 30
    router_bias_update_rate: NotNegative = 0.0
    balanced_routing: bool = False
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.999
    adam_eps: Positive = 1e-8


@dataclass
class RolloutAscend:
    """Options of vllm-ascend, on platform npu only; run/engine_options.py writes them where the engine reads them.

    Symbols are those of vllm-ascend f20869ef. Defaults are the pin's, unless a reason is given.

    graphs: decode in torchair graphs, which the tiny model's runs do not need. It decides rollout.enforce_eager and
    rollout.free_cache_engine too, as the pin refuses other combinations
    (vllm_ascend.ascend_config.check_ascend_config).
    graph_batch_sizes: sizes to which decode batches are padded, a graph each, 0.5 to 1.5 minutes to compile
    (vllm_ascend.worker.model_runner_v1.NPUModelRunner.capture_model); null takes max_num_seqs alone, where the pin adds
    a graph of 1 (NPUModelRunner.check_torchair_graph_batch_sizes).
    multistream_mla: KV normalisation and rotary embedding of decode on a second stream
    (vllm_ascend.attention.mla_v1.AscendMLAImpl.exec_kv; row rollout.ascend_multistream_mla).
    multistream_moe: the shared expert of decode on a second stream (vllm_ascend.ops.fused_moe.AscendFusedMoE); with TP
    its weights are whole on every rank (vllm_ascend.models.deepseek_v2.CustomDeepseekV2MoE) and tokens go to experts
    without an all-reduce (vllm_ascend.models.deepseek_v2.CustomDeepseekV2DecoderLayer).
    view_optimize: torchair folds views into strides
    (vllm_ascend.worker.model_runner_v1.NPUModelRunner._get_torchair_lazy_compiled_model).
    kv_nz: the KV cache in the NZ format; true is refused: prompts are written a second time in the other format
    (vllm_ascend.attention.mla_v1.AscendMLAImpl.forward; vllm-ascend PR 3066).
    scheduler: V1's own, which mixes decodes and pieces of prompts, or vllm-ascend's
    (vllm_ascend.platform.NPUPlatform.check_and_update_config), which takes prompts whole.
    chunked_prefill_for_mla: attention of a piece of a prompt by the ring kernel instead of a loop
    (vllm_ascend.attention.mla_v1.AscendMLAImpl._forward_prefill).
    prefix_caching: requests share the KV of equal beginnings, as the n responses of a prompt do.
    vllm_sleep_mode: false frees weights and KV cache to torch's pool, has graphs read addresses at each call (row
    memory.graph_addresses), and gives torch expandable segments (PYTORCH_NPU_ALLOC_CONF); not tried with torchair's
    compiler. true keeps vLLM's sleep mode, whose memory comes back at the addresses that graphs hold (docs/memory.md).
    top_k_optimize: top-k and top-p by a threshold, without a scatter of the vocabulary
    (VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE, vllm_ascend.patch.worker.patch_common.patch_sampler); on, as the vocabulary has
    129,280 words.
    """

    graphs: bool = False
    graph_batch_sizes: list[Count] | None = None
    multistream_mla: bool = False
    multistream_moe: bool = False
    view_optimize: bool = True
    kv_nz: bool = False
    scheduler: Annotated[str, one_of("v1", "ascend")] = "v1"
    chunked_prefill_for_mla: bool = False
    prefix_caching: bool = True
    vllm_sleep_mode: bool = False
    top_k_optimize: bool = True


@dataclass
class Rollout:
    """The rollout layout, beyond verl's rollout section.

    dp: data-parallel ranks inside one vLLM instance; experts are split over dp x tp ranks.
    instances: number of vLLM instances; null takes world size / (dp x tp).
    expert_parallel: split experts over the ranks of an instance instead of cutting each of them.
    balanced_routing: send equally many tokens to every expert, whatever the router says. For speed runs on npu only.
    rebalance_every: decode steps between two exchanges in which running requests, with their KV blocks, may move from
    data-parallel ranks with many requests to those with few; null: never. Platform npu with dp > 1 only.
    replay: run folder of recorded responses to train on instead of sampling.
    record: keep every step's responses and their rewards in <run>/rollouts.
    """

    dp: Count = 1
    instances: Count | None = None
    expert_parallel: bool = False
    balanced_routing: bool = False
    rebalance_every: Count | None = None
    replay: Text | None = None
    record: bool = True
    ascend: RolloutAscend = field(default_factory=RolloutAscend)


@dataclass
class WeightSync:
    """The weight sync from training to vLLM before each rollout.

    enabled: false keeps vLLM at the weights of the first sync.
    """

    enabled: bool = True


@dataclass
class Reshard:
    """How weights are synced by rows reshard.*; without them verl's own path runs and these keys have no effect.

    bucket_bytes: most bytes that a rank sends, and receives, in one exchange. A sync uses four such buffers.
    verify: which syncs are verified. A verified sync fills vLLM's weights with NaN first and afterwards compares
    checksums of every region over all ranks that hold it; once for each learnt map vLLM also loads its weights again.
    This takes some passes over the weights and memory that the step table does not count. recipe.logprob_check
    compares log-probs.
    """

    bucket_bytes: Count = 512 << 20
    verify: Annotated[str, one_of("off", "first", "every")] = "first"


@dataclass
class RolloutCorrection:
    """Corrects the policy gradient where vLLM's probabilities differ from the actor's; names are verl's.

    rollout_is: token or sequence, whose pi_actor / pi_rollout weights a token's gradient; null is off.
    rollout_is_threshold: upper limit of that weight.
    rollout_rs: give no gradient to sequences whose pi_rollout / pi_actor (the inverse, as in verl) is outside
    rollout_rs_threshold. seq_sum_k1 multiplies the ratios of its tokens, seq_mean_k1 takes their geometric mean; null
    is off.
    rollout_rs_threshold: LOWEST_HIGHEST, such as 0.5_2.0, or the highest alone, such as 2.0; each number with a
    decimal point, as YAML reads 0.5_2 as 0.52.
    """

    rollout_is: Annotated[str, one_of("token", "sequence")] | None = None
    rollout_is_threshold: Positive = 2.0
    rollout_rs: Annotated[str, one_of("seq_sum_k1", "seq_mean_k1")] | None = None
    rollout_rs_threshold: str | None = None


@dataclass
class KeepGroups:
    """Dynamic sampling (DAPO): only prompts whose responses have different rewards are trained on.

    metric: what must differ: score, the reward, or a key of the reward function's dict, such as acc; null: all prompts
    are trained on. Otherwise batches are drawn, with one weight sync, until data.train_batch_size prompts are found;
    what is left over is dropped. Epochs do not end the run then, trainer.total_training_steps does.
    max_batches: the run ends where a step finds too few prompts in this many batches.
    """

    metric: Text | None = None
    max_batches: Count = 10


@dataclass
class TensorCache:
    """The tensor cache, on in the 256-die configurations.

    enabled: keep what rollout, log-prob and reference produce on the workers, in the order of the update. The trainer
    receives lengths and unpadded ids, and returns advantages. With trainer.balance_batch the micro batches of all
    train replicas have about equal lengths, in the same mini batches (step/batches/batch_plan.py); with use_dynamic_bsz
    they are packed within the token budget. Without balance_batch micro batches are verl's.
    """

    enabled: bool = False


@dataclass
class Memory:
    """The memory ledger of every worker, and what the memory plan is compared with.

    host_gib: host memory of a node in GiB that workers may pin; the plan refuses to exceed it. null: not compared.
    ledger: compares what is on the device in each phase with the table in memory/schedule.py. report logs and records
    differences, strict stops the run at the first one, off compares nothing.
    """

    host_gib: Count | None = None
    ledger: Annotated[str, one_of("off", "report", "strict")] = "report"


@dataclass
class LogprobCheck:
    """The truth check: vLLM's log-probs of sampled tokens against the actor's, as mean |delta| in nats.

    action: stop ends the run with an error, report only prints and stores, off does not compare.
    every: null compares the responses of every step, which needs temperature 1 with top-p and top-k off. N samples
    extra sequences for the check in the first step and each N-th after it; the step itself does not change.
    sequences: number of those extra sequences over all rollout replicas, equally many each, of at most 256 tokens;
    null is one a replica.
    max_mean_fp32, max_mean_bf16: limit for each training dtype.
    """

    action: Annotated[str, one_of("stop", "report", "off")] = "stop"
    every: Count | None = None
    sequences: Count | None = None
    max_mean_fp32: Positive = 1e-5
    max_mean_bf16: Positive = 0.05


@dataclass
class Hccl:
    """Ascend's collectives, on platform npu only (run/hccl.py).

    interface: network interface of every node for rendezvous and host traffic; null: each node uses the one towards
    Ray's head. HCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or TP_SOCKET_IFNAME in a node's own environment override both.
    buffer_mib: HCCL_BUFFSIZE in MiB; null: what the layout needs.
    small_groups_mib: the same for groups of Megatron and vLLM over which neither training nor MC2 exchanges experts;
        null: HCCL_BUFFSIZE.
    expansion_mode: what runs collectives on the device: its vector cores (AIV) or its AI CPU; HOST, the
    host, is for A2 alone.
    base_port: first of the 144 ports that HCCL listens on, on every node.
    """

    interface: str | None = None
    buffer_mib: Count | None = None
    small_groups_mib: Count | None = 64
    expansion_mode: Annotated[str, one_of("AIV", "AI_CPU", "HOST")] = "AIV"
    base_port: _HcclPort = 61000


@dataclass
class Timeouts:
    """When a run is ended.

    wall_s: seconds since the start; null: no limit.
    quiet_s: seconds since the last output; null: no limit.
    load_s: seconds that a worker which has read its weights waits for the slowest one, before any collective.
    """

    wall_s: Positive | None = None
    quiet_s: Positive | None = None
    load_s: Positive = 3600.0


@dataclass
class Profile:
    """Traces of chosen steps, ranks and phases (worker/profile.py), and the peak rate of a device for MFU.

    steps: numbers of the steps that are profiled, as the step table counts them; null: none. Their times are not
    comparable, and medians of `report` leave them out.
    ranks: ranks that write traces.
    phases: phases of memory/schedule.py that they trace, but reward and advantage, which run on the controller; null:
    all of them.
    stacks: traces have Python stacks too, which makes them larger and the phases slower.
    peak_tflops: dense bf16 TFLOP/s of one device; null takes that of the platform (353.9 of an A3 die), and on a CPU,
    which has none, MFU is not printed (layout/flops.py).
    """

    steps: list[Count] | None = None
    ranks: list[Natural] = field(default_factory=lambda: [0])
    phases: list[Annotated[str, one_of(*PROFILED)]] | None = None
    stacks: bool = False
    peak_tflops: Positive | None = None


@dataclass
class Watch:
    """The watch of a run (docs/watch.md): which rank it waits for, and for how long it may.

    action: stop ends a run that stalls, report only logs and records it, off starts no heartbeats.
    first_s: bound of a phase that a process has not ended before, in seconds; for loading, for writing a checkpoint and
    for a trace at least recipe.timeouts.load_s, each time, for validation the first time.
    least_s: bound of a phase that it has ended before, whatever it took.
    factor: bound of a phase as a multiple of its longest duration so far on any rank. The largest bound holds.
    Whatever these say, a rank may wait for another in a process group for 0.8 of collective_timeout_minutes.
    """

    action: Annotated[str, one_of("stop", "report", "off")] = "stop"
    first_s: Positive = 1800.0
    least_s: Positive = 900.0
    factor: Factor = 5.0


@dataclass
class Alarms:
    """Named alarms over the record of each step (trainer/alarms.py). A bound of null switches its alarm off.

    action: warn prints and records an alarm, stop ends the run at the first one.
    expert_load: alarm expert_collapse where the largest load of an expert is above this multiple of the mean; needs
    recipe.expert_load.
    length_share: alarm length_collapse where responses are shorter than this share of the median of the first steps.
    at_limit: alarm length_limit where more than this share of the responses ends at the length limit.
    dlogp_factor: alarm dlogp_drift where the mean |dlogp| is above this multiple of the median of the first steps.
    baseline_steps: number of first steps of this process whose median is compared with; no such alarm before.
    """

    action: Annotated[str, one_of("warn", "stop")] = "warn"
    expert_load: Positive | None = 16.0
    length_share: Share | None = 0.25
    at_limit: Share | None = None
    dlogp_factor: Factor | None = 10.0
    baseline_steps: Count = 5


@dataclass
class Restart:
    """Starting a run again from its last checkpoint (launch/restart.py).

    times: how often at most; for a stall, a dead worker, a lost node or a failed connection, not for other errors.
    without_nodes: ids or addresses of nodes of a joined Ray (recipe.ray_address) on which nothing is placed. A restart
    adds the faulty one, if enough others are there.
    """

    times: Natural = 0
    without_nodes: list[Text] = field(default_factory=list)


@dataclass
class Objective:
    """What is trained: rewards of sampled responses, or a loss of fixed ones, for which no rollout engine is started.

    name: rl, or a loss of the data's responses (docs/own-data-and-reward.md has their columns). sft, dpo, ipo and kto
    train the actor; rm and prm train the critic as a reward model of responses, or of steps.
    beta: of dpo, ipo and kto, the scale of the log-ratio to the reference model.
    label_smoothing: of dpo (cDPO), the share of pairs whose preference is taken to be the other way round.
    desirable_weight, undesirable_weight: of kto, the weight of rows with label true, and of the others.
    """

    name: Annotated[str, one_of("rl", "sft", "dpo", "ipo", "kto", "rm", "prm")] = "rl"
    beta: Positive = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0


@dataclass
class Recipe:
    """One run.

    run: name of the run; each start writes to a new folder <output_root>/<run>/0001, 0002, ... (docs/checkpoints.md).
    null, without the launcher alone: no record.
    output_root: folder of all runs, relative to the current folder; null: outputs in this repository, wherever the
    command is called.
    line: the set of pins: pypi (CPU) or a3 (production).
    platform: the kind of device. cpu uses stand-ins for compiled code; npu_emulated runs what npu does, on a CPU.
    hardware: the kind of machine with NPUs: Atlas A3, 800T A2, or 200T A2 Box16 (docs/support.md). Of A2 memory and
    layouts are planned, and no seconds.
    patches: +row.id or -row.id, switches of the catalogue's rows; `*` stands for any text.
    drift: what to do where upstream is not as reviewed: strict stops the run, warn applies the row where it can and
    marks it.
    dtype: dtype of training and rollout.
    ray_address: null starts a Ray on this machine; "auto" or HOST:PORT joins a running one.
    worker_process_setup_hook: "package.module.function" of the user's, run in every Ray worker after the prelude and
    before Ray gives it a die. On npu it must not import torch_npu.
    ray_port: port of the Ray that the run starts; null: any free one.
    expert_load: count the tokens of each expert; every step records max / mean, in training and in rollout on npu.
    model_shape: HF config.json from which the plan reads sizes, relative to the configs folder.
    num_hidden_layers: train and serve only the model's first N layers, with its embedding, final norm and head; null:
    all. The model's folder stays as it is, with random init or weights. layers_per_stage for all layers is balanced
    again.
    added_keys: keys, or sections, that verl's own file does not list, given as +key=value, which the user's code reads.
    resume_other_data: resume from a checkpoint whose data (number of rows, bytes of the files) were others.
    rewards: the parts of a response's reward; keys of each are those of recipe.rewards[] below. null:
    custom_reward_function, the short form of one entry of name python, or without its path verl's own scores by
    data source.
    """

    run: Name | None = "run"
    output_root: Text | None = None
    line: Annotated[str, one_of(*LINES)] = "a3"
    platform: Annotated[str, one_of(*PLATFORMS)] = "npu"
    hardware: Annotated[str, one_of(*HARDWARE)] = "a3"
    patches: list[_Pattern] = field(default_factory=list)
    drift: Annotated[str, one_of(*DRIFT_POLICIES, note=NO_SKIP)] = "strict"
    dtype: Annotated[str, one_of(*VLLM_DTYPES)] = "bf16"
    ray_address: RayAddress | None = None
    worker_process_setup_hook: Dotted | None = None
    ray_port: Port | None = None
    expert_load: bool = False
    model_shape: str = "model/deepseekv3_671b.json"
    num_hidden_layers: Count | None = None
    added_keys: list[Text] = field(default_factory=list)
    resume_other_data: bool = False
    objective: Objective = field(default_factory=Objective)
    rewards: list[dict[str, Any]] | None = None
    train: Train = field(default_factory=Train)
    rollout: Rollout = field(default_factory=Rollout)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    reshard: Reshard = field(default_factory=Reshard)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    keep_groups: KeepGroups = field(default_factory=KeepGroups)
    tensor_cache: TensorCache = field(default_factory=TensorCache)
    memory: Memory = field(default_factory=Memory)
    logprob_check: LogprobCheck = field(default_factory=LogprobCheck)
    hccl: Hccl = field(default_factory=Hccl)
    profile: Profile = field(default_factory=Profile)
    timeouts: Timeouts = field(default_factory=Timeouts)
    watch: Watch = field(default_factory=Watch)
    alarms: Alarms = field(default_factory=Alarms)
    restart: Restart = field(default_factory=Restart)


def recipe_from(section: Mapping[str, Any]) -> Recipe:
    """Return the section as typed values; its keys and values must have passed `check_recipe`."""
    return _recipe_adapter().validate_python(section)


@functools.cache
def _recipe_adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


class Key(NamedTuple):
    """A key of the section: its default (MISSING of a list), and its type."""

    default: Any
    kind: Any


def recipe_keys(schema: type = Recipe, prefix: str = "recipe") -> Iterator[tuple[str, Key]]:
    """(dotted key, Key) of every leaf of the section, in order."""
    types = types_of(schema)
    for item in fields(schema):
        name, kind = f"{prefix}.{item.name}", types[item.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from recipe_keys(kind, name)
        else:
            yield name, Key(item.default, kind)


# the entries of recipe.rewards, and the parts of a run's reward


FORMAT_WEIGHT, MAX_FORMAT_WEIGHT = 0.1, 0.5  # of a wrong answer in the right form: its score, and the most
CPU_LIMIT_S = 1.0  # of a comparison of two answers
TAKES = {  # keys of an entry beside name and weight
    "maths": ("format_weight", "cpu_limit_s"),
    "by_source": ("format_weight", "cpu_limit_s"),
    "learnable": (),
    "format": (),
    "length": ("buffer_tokens",),
    "reward_model": ("path",),
    "python": ("path", "function", "kwargs"),
    "data_source": (),
}


@dataclass
class Reward:
    """One part. The reward of a response is the sum of weight x score over the parts (rewards/manager.py).

    name: maths compares the last \\boxed{} of a response with the gold answer; learnable is the task of smoke --learn;
    by_source is learnable for rows of that task and maths for all others; format is 1 for a closed last \\boxed{} that
    is not empty, else 0; length is DAPO's penalty near the length limit, -1 at the limit (arXiv:2503.14476, eq. 13);
    reward_model is a model's score of prompt and response, at the last token; python calls a function with verl's
    compute_score contract; data_source is verl's own score by a row's data_source.
    weight: factor of the part's score. 0 only reports the part's mean.
    format_weight: of maths and by_source: score of a wrong answer in the right form.
    cpu_limit_s: of maths and by_source: CPU time of a comparison, which is wrong where it takes more.
    buffer_tokens: of length: the penalty begins this many tokens before data.max_response_length and falls linearly;
    null is a fifth of it, DAPO's share.
    path: of python: the file; of reward_model: a folder with a score head, as a checkpoint of algo=rm.
    function: of python: the function in the file.
    kwargs: of python: keyword arguments of the function.
    """

    name: Annotated[str, one_of(*TAKES)]
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    format_weight: Annotated[float, Field(ge=0, le=MAX_FORMAT_WEIGHT)] = FORMAT_WEIGHT
    cpu_limit_s: Positive = CPU_LIMIT_S
    buffer_tokens: Count | None = None
    path: Text | None = None
    function: Text = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)

    def buffer_of(self, longest: int) -> int:
        """Tokens over which the penalty of `length` falls, for responses of at most `longest` tokens."""
        return self.buffer_tokens or max(longest // 5, 1)


class Part(NamedTuple):
    """An entry; `where` is its key in the configuration, `label` its name in metrics."""

    where: str
    label: str
    entry: Reward

    @property
    def path(self) -> str:
        """The path of an entry of name python or reward_model, which rewards/parts.py requires."""
        assert self.entry.path is not None
        return self.entry.path

    def __str__(self) -> str:
        return f"{self.where} ({self.entry.name})"
