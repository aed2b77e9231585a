"""Define the typed `recipe:` section, which has the settings of a run that verl's own configuration does not have.

Hydra merges the section as a dataclass schema, so an unknown key is refused by name. A key belongs here only if some
code acts on it. `RunSpec.recipe` (spec.py) holds the section of a run. docs/configuration.md is generated from the
docstrings, which describe each key as "key: text" or "key, key: text".
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Annotated, Any, NamedTuple

from pydantic import Field, TypeAdapter

from verl_patches.layout.phases import MEMORY_PHASES
from verl_patches.patching.spec import DRIFT_POLICIES, LEVELS, LINES, PLATFORMS
from verl_patches.platform.npu.machine import HARDWARE
from verl_patches.values import (
    Count,
    Decay,
    Dotted,
    Factor,
    Name,
    Natural,
    NotNegative,
    Positive,
    RayAddress,
    Share,
    Text,
    field_types,
)

VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
HCCL_PORTS = 32 + 112  # of a node: 32 from HCCL_IF_BASE_PORT on, the others are HCCL_HOST_SOCKET_PORT_RANGE

CONTROLLER_PHASES = ("reward", "advantage")  # phases in which workers do nothing
PROFILED_PHASES = tuple(phase for phase in MEMORY_PHASES if phase not in CONTROLLER_PHASES)


def choices(*words: str) -> Any:
    """Return the constraint of a text that is one of `words`, for `Annotated[str, choices(...)]`."""
    return Field(pattern=f"^({'|'.join(words)})$", description=f"one of {', '.join(words)}")


_HcclPort = Annotated[int, Field(ge=1024, le=65536 - HCCL_PORTS)]
_Pattern = Annotated[str, Field(pattern=r"^[+-].", description="+row.id or -row.id")]


@dataclass
class Train:
    """Set the training layout and engine, beyond verl's megatron section.

    layers_per_stage: number of layers of each pipeline stage in model order; null splits them evenly.
    expert_split: etp cuts each expert over expert_tensor_parallel_size ranks; tp_extend_ep spreads whole experts over
    expert_model_parallel_size ranks. These are the TP x EP ranks of MindSpeed's moe_tp_extend_ep.
    skip_old_log_prob: the update uses its own log-probs as the old ones, and the actor's separate pass for them is
    left out. Refused unless the update is one mini batch and one epoch (step/log_probs/ratio_settings.py).
    importance_ratio: the ratio of new and old probability that the update clips: each token's, or the geometric mean
    over the sequence (GSPO). sequence needs loss_agg_mode=seq-mean-token-mean.
    routing_replay: R2 lets the update select the experts that the actor's pass for old log-probs has selected
    (step/replay/routing_replay.py); null: each pass routes by itself.
    max_skipped_steps: end the run after this many optimizer steps in a row with a gradient that is NaN or infinite.

    The other keys are for line a3; line pypi accepts only their defaults. model/mindspeed/arguments.py maps each to an
    engine argument.

    swap_optimizer: keep optimizer states on the host; the update brings them to the device in pieces of whole tensors.
    swap_optimizer_times: a piece holds at most 1/swap_optimizer_times of the states, or one tensor.
    use_fused_rmsnorm, use_fused_swiglu, use_fused_rotary_pos_emb: MindSpeed's fused kernel of that name.
    use_fused_moe_token_permute_and_unpermute: MindSpeed's fused kernels that order tokens by expert, and back.
    gradient_accumulation_fusion, gemm_gradient_accumulation_fusion: add weight gradients of linear layers, or of
    experts, to the fp32 gradients inside the matrix product's kernel.
    unpadded_attention: pass attention values with their own v_head_dim, instead of padding query, key and value. At
    671B they are padded to 256.
    moe_alltoall_overlap_comm: overlap the experts' exchange with computation.
    distributed_timeout_minutes: time limit of a training collective; HCCL's own, on NPUs, is a minute less.
    moe_router_bias_update_rate: step size of the router's correction bias; 0 leaves it unchanged. It grows for experts
    with few tokens of the update. No auxiliary loss is used.
    balanced_routing: send equally many tokens to every expert, regardless of the router. For speed runs only.
    adam_beta1, adam_beta2, adam_eps: Adam's parameters; the defaults are those of verl and Megatron.
    """

    layers_per_stage: list[Count] | None = None
    expert_split: Annotated[str, choices("etp", "tp_extend_ep")] = "etp"
    skip_old_log_prob: bool = False
    importance_ratio: Annotated[str, choices("token", "sequence")] = "token"
    routing_replay: Annotated[str, Field(pattern="^R2$", description="R2")] | None = None
    swap_optimizer: bool = False
    swap_optimizer_times: Count = 16
    max_skipped_steps: Count = 3
    use_fused_rmsnorm: bool = True
    use_fused_swiglu: bool = True
    use_fused_rotary_pos_emb: bool = True
    use_fused_moe_token_permute_and_unpermute: bool = True
    gradient_accumulation_fusion: bool = False
    gemm_gradient_accumulation_fusion: bool = False
    unpadded_attention: bool = False
    moe_alltoall_overlap_comm: bool = False
    distributed_timeout_minutes: Count = 30
    moe_router_bias_update_rate: NotNegative = 0.0
    balanced_routing: bool = False
    adam_beta1: Decay = 0.9
    adam_beta2: Decay = 0.999
    adam_eps: Positive = 1e-8


@dataclass
class RolloutAscend:
    """Set options of vllm-ascend, on platform npu only. run/engine_options.py writes them where the engine reads them.

    A default is the pin's unless its key gives a reason. Symbols are those of vllm-ascend f20869ef.

    graphs: decode in torchair graphs. It decides rollout.enforce_eager and rollout.free_cache_engine too, as the pin
    refuses other combinations (vllm_ascend.ascend_config.check_ascend_config).
    graph_batch_sizes: sizes to which decode batches are padded; null: max_num_seqs, at level=tuned more. Each has a
    graph, which takes 0.5 to 1.5 minutes to compile (vllm_ascend.worker.model_runner_v1.NPUModelRunner.capture_model).
    The further ones of level=tuned are 8, 16, 32, ... below max_num_seqs, unless rollout.ignore_eos keeps batches full.
    multistream_mla: run KV normalisation and rotary embedding of decode on a second stream
    (vllm_ascend.attention.mla_v1.AscendMLAImpl.exec_kv).
    multistream_moe: run the shared expert of decode on a second stream (vllm_ascend.ops.fused_moe.AscendFusedMoE). With
    TP its weights are whole on every rank (vllm_ascend.models.deepseek_v2.CustomDeepseekV2MoE) and tokens go to experts
    without an all-reduce (vllm_ascend.models.deepseek_v2.CustomDeepseekV2DecoderLayer).
    view_optimize: let torchair fold views into strides
    (vllm_ascend.worker.model_runner_v1.NPUModelRunner._get_torchair_lazy_compiled_model).
    kv_nz: keep the KV cache in the NZ format; true is refused. Prompts are written a second time in the other format
    (vllm_ascend.attention.mla_v1.AscendMLAImpl.forward; vllm-ascend PR 3066).
    scheduler: v1 is vLLM V1's, which mixes decodes and chunks of prompts; ascend is vllm-ascend's
    (vllm_ascend.platform.NPUPlatform.check_and_update_config), which takes prompts whole.
    chunked_prefill_for_mla: compute attention of a prompt's chunk by the ring kernel instead of a loop
    (vllm_ascend.attention.mla_v1.AscendMLAImpl._forward_prefill).
    mla_pa: let eager decode read both KV caches in place, in place of a copy (VLLM_ASCEND_MLA_PA).
    prefix_caching: let requests share the KV of equal prefixes, as the n responses of a prompt do.
    top_k_optimize: apply top-k and top-p by a threshold, without a scatter of the vocabulary's 129,280 words
    (VLLM_ASCEND_ENABLE_TOPK_OPTIMIZE, vllm_ascend.patch.worker.patch_common.patch_sampler).
    """

    graphs: bool = False
    graph_batch_sizes: list[Count] | None = None
    multistream_mla: bool = False
    multistream_moe: bool = False
    view_optimize: bool = True
    kv_nz: bool = False
    scheduler: Annotated[str, choices("v1", "ascend")] = "v1"
    chunked_prefill_for_mla: bool = False
    mla_pa: bool = True
    prefix_caching: bool = True
    top_k_optimize: bool = True


@dataclass
class Rollout:
    """Set the rollout layout, beyond verl's rollout section.

    data_parallel_size: data-parallel ranks inside one vLLM instance; experts are split over dp x tp ranks.
    instances: number of vLLM instances; null takes world size / (dp x tp).
    enable_expert_parallel: split experts over the ranks of an instance instead of cutting each of them.
    balanced_routing: send equally many tokens to every expert, regardless of the router. For speed runs on npu only.
    replay: run folder of recorded responses to train on instead of sampling.
    record: keep every step's responses and their rewards in <run>/rollouts.
    """

    data_parallel_size: Count = 1
    instances: Count | None = None
    enable_expert_parallel: bool = False
    balanced_routing: bool = False
    replay: Text | None = None
    record: bool = True
    ascend: RolloutAscend = field(default_factory=RolloutAscend)


@dataclass
class WeightSync:
    """Set whether weights are synced from training to vLLM before each rollout.

    enabled: false keeps vLLM at the weights of the first sync.
    """

    enabled: bool = True


@dataclass
class Reshard:
    """Set how rows reshard.* sync weights; without these rows verl's own path runs and the keys have no effect.

    bucket_bytes: the most bytes that a rank sends, and receives, in one exchange. A sync uses four such buffers.
    verify: the syncs that are verified. A verified sync fills vLLM's weights with NaN first and afterwards compares
    checksums of every region over all ranks that hold it. The first one after the sync has looked up where the tensors
    lie (at the start, and when they have moved) also checks these places, by vLLM's load_weights. This takes some
    passes over the weights and memory that the step table does not count. recipe.logprob_check compares log-probs
    instead.
    """

    bucket_bytes: Count = 512 << 20
    verify: Annotated[str, choices("off", "first", "every")] = "first"


@dataclass
class RolloutCorrection:
    """Correct the policy gradient where vLLM's probabilities differ from the actor's; names are verl's.

    rollout_is: weight a token's gradient by pi_actor / pi_rollout of the token or of its sequence; null is off.
    rollout_is_threshold: upper limit of that weight.
    rollout_rs: give no gradient where pi_rollout / pi_actor is outside rollout_rs_threshold; null is off. The ratio is
    the inverse, as in verl: a token's (token_k1), the product over its sequence (seq_sum_k1) or its geometric mean
    (seq_mean_k1).
    rollout_rs_threshold: LOWEST_HIGHEST, such as 0.5_2.0, or the highest alone, such as 2.0. Each number has a
    decimal point, as YAML reads 0.5_2 as 0.52.
    """

    rollout_is: Annotated[str, choices("token", "sequence")] | None = None
    rollout_is_threshold: Positive = 2.0
    rollout_rs: Annotated[str, choices("token_k1", "seq_sum_k1", "seq_mean_k1")] | None = None
    rollout_rs_threshold: str | None = None


@dataclass
class FilterGroups:
    """Train only on prompts whose responses have different rewards (dynamic sampling of DAPO).

    metric: the value that must differ: score (the reward), or a key of the reward function's dict, such as acc; null
    trains on all prompts. With a metric each step draws batches, after one weight sync, until it has found
    data.train_batch_size prompts, drops further ones, and the run ends by trainer.total_training_steps, not by epochs.
    max_num_gen_batches: end the run where a step finds too few prompts in this many batches.
    """

    metric: Text | None = None
    max_num_gen_batches: Count = 10


@dataclass
class TensorCache:
    """Set the tensor cache, which is on in the 256-die configurations.

    enabled: keep tensors from rollout, log-prob and reference on the workers, in the order of the update. The trainer
    receives lengths and unpadded ids, and returns advantages. With trainer.balance_batch the micro batches of all
    train replicas have about equal lengths, in the same mini batches (step/batches/batch_plan.py); with use_dynamic_bsz
    they are packed within the token budget. Without balance_batch micro batches are verl's.
    """

    enabled: bool = False


@dataclass
class Memory:
    """Set the memory ledger of every worker, and the host memory that the memory plan is compared with.

    host_gib: host memory of a node in GiB, of which the plan leaves Ray's memory monitor 5 %. null: not compared.
    ledger: compare the memory groups on the device in each phase with the table in memory/schedule.py. report logs and
    records differences, strict stops the run at the first one, off compares nothing.
    """

    host_gib: Count | None = None
    ledger: Annotated[str, choices("off", "report", "strict")] = "report"


@dataclass
class LogprobCheck:
    """Compare vLLM's log-probs of sampled tokens with the actor's, as mean |delta| in nats.

    action: stop ends the run with an error, report only prints and stores, off does not compare.
    every: null compares the responses of every step, which needs temperature 1 with top-p and top-k off. N samples
    an extra sequence of at most 256 tokens on each replica, in the first step and each N-th after it; the step itself
    does not change.
    max_mean_fp32, max_mean_bf16: limit of mean |delta| for this training dtype.
    """

    action: Annotated[str, choices("stop", "report", "off")] = "stop"
    every: Count | None = None
    max_mean_fp32: Positive = 1e-5
    max_mean_bf16: Positive = 0.05


@dataclass
class Hccl:
    """Set up Ascend's collectives, on platform npu only (run/hccl.py).

    interface: network interface of every node for rendezvous and host traffic; null: each node uses the one towards
    Ray's head. HCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME or TP_SOCKET_IFNAME in a node's own environment override both.
    buffer_mib: HCCL_BUFFSIZE in MiB; null: the size that the layout needs.
    small_groups_mib: buffer in MiB for groups of Megatron and vLLM over which neither training nor MC2 sends
        tokens to experts; null: HCCL_BUFFSIZE.
    expansion_mode: the unit that runs collectives: the device's vector cores (AIV), its AI CPU (AI_CPU), or the host
    (HOST), which is for A2 alone.
    base_port: first of the 144 ports that HCCL listens on, on every node.
    """

    interface: str | None = None
    buffer_mib: Count | None = None
    small_groups_mib: Count | None = 64
    expansion_mode: Annotated[str, choices("AIV", "AI_CPU", "HOST")] = "AIV"
    base_port: _HcclPort = 61000


@dataclass
class Timeouts:
    """Set the times after which a run is ended.

    wall_s: seconds since the start; null: no limit.
    quiet_s: seconds since the last output; null: no limit.
    load_s: seconds without a byte read or written after which a run ends that loads weights, or waits for a checkpoint.
    """

    wall_s: Positive | None = None
    quiet_s: Positive | None = None
    load_s: Positive = 3600.0


@dataclass
class Profile:
    """Choose steps, ranks and phases to trace (worker/profile.py), and the peak rate of a device for MFU.

    steps: numbers of the steps that are profiled, as the step table counts them; null: none. Their times are not
    comparable, and medians of `report` leave them out.
    ranks: ranks that write traces.
    phases: phases that they trace, such as [rollout, update]; null traces all. They are those of memory/schedule.py,
    without reward and advantage, which run on the controller.
    stacks: record Python stacks too, which makes traces larger and the phases slower.
    peak_tflops: dense bf16 TFLOP/s of one device; null takes that of the platform (353.9 of an A3 die). A CPU has no
    default, so that MFU is not printed (layout/flops.py).
    """

    steps: list[Count] | None = None
    ranks: list[Natural] = field(default_factory=lambda: [0])
    phases: list[Annotated[str, choices(*PROFILED_PHASES)]] | None = None
    stacks: bool = False
    peak_tflops: Positive | None = None


@dataclass
class Watch:
    """Set the stall detection of a run (docs/operate.md): how long a process may stay in one phase.

    action: stop ends a run that stalls, off starts no heartbeats.
    first_s: bound in seconds of a phase that a process has not ended before. Writing a trace has at least
    recipe.timeouts.load_s every time, validation the first time; so have loading and waiting for a checkpoint, counted
    from the last byte that any process read or wrote.
    least_s: least bound in seconds of a phase that the process has ended before.
    factor: bound of a phase as a multiple of its longest duration so far on any rank. The largest bound applies.
    Independently of these, a rank may wait for another in a process group for 0.8 of distributed_timeout_minutes.
    """

    action: Annotated[str, choices("stop", "off")] = "stop"
    first_s: Positive = 1800.0
    least_s: Positive = 900.0
    factor: Factor = 5.0


@dataclass
class Alarms:
    """Raise named alarms over the record of each step (trainer/alarms.py). A bound of null switches its alarm off.

    action: warn prints and records an alarm, stop ends the run at the first one that is no growth.
    expert_load: raise expert_collapse where an expert has more than this multiple of the mean (recipe.expert_load).
    length_share: raise length_collapse where responses are shorter than this share of the median of the first steps.
    at_limit: raise length_limit where more than this share of the responses ends at the length limit.
    dlogp_factor: raise dlogp_drift where the mean |dlogp| is above this multiple of the median of the first steps.
    baseline_steps: number of this process's first steps from which the medians are taken. Before that many steps
    length_collapse and dlogp_drift are not raised.
    growth: raise rss_growth, device_growth or seconds_growth where the memory of a process or of a device, or the
    seconds of a step, grow by more than this share in 20 steps. node_growth is raised where a node's memory will be
    full.
    max_growth: end the run, whatever `action` is, where one of these grows by more than this share.
    """

    action: Annotated[str, choices("warn", "stop")] = "warn"
    expert_load: Positive | None = 16.0
    length_share: Share | None = 0.25
    at_limit: Share | None = None
    dlogp_factor: Factor | None = 10.0
    baseline_steps: Count = 5
    growth: Positive | None = 0.1
    max_growth: Positive | None = None


@dataclass
class Restart:
    """Set when a run is started again from its last checkpoint (launch/restart.py).

    max_restarts: the most restarts; only a stall, a dead worker, a lost node or a failed connection causes one.
    exclude_nodes: ids or addresses of nodes of a joined Ray (recipe.ray_address) on which nothing is placed. A restart
    adds the faulty node where enough others remain.
    """

    max_restarts: Natural = 0
    exclude_nodes: list[Text] = field(default_factory=list)


@dataclass
class Data:
    """Choose what happens to bad rows of data.train_files and data.val_files (docs/data.md).

    skip_bad_rows: drop and count rows that would end the run later or could never score; false refuses the first one.
    """

    skip_bad_rows: bool = False


@dataclass
class Objective:
    """Choose the objective: rewards of sampled responses, or a loss of fixed ones, which starts no rollout engine.

    name: rl, or a loss of the data's responses (docs/data.md has their columns). sft, dpo, ipo and kto
    train the actor; rm and prm train the critic as a reward model of responses, or of steps.
    beta: scale of the log-ratio to the reference model, for dpo, ipo and kto.
    label_smoothing: share of pairs whose preference is taken to be the other way round, for dpo (cDPO).
    desirable_weight, undesirable_weight: weight of rows with label true, and of the others, for kto.
    """

    name: Annotated[str, choices("rl", "sft", "dpo", "ipo", "kto", "rm", "prm")] = "rl"
    beta: Positive = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    desirable_weight: NotNegative = 1.0
    undesirable_weight: NotNegative = 1.0


@dataclass
class Recipe:
    """Hold the settings of one run.

    run: name of the run, whose starts write to <output_root>/<run>/0001, 0002 and so on (docs/operate.md).
    null is allowed only without the launcher and writes no record.
    output_root: folder of all runs, relative to the current folder; null: the folder outputs of this repository.
    line: the set of pins: pypi (CPU) or a3 (production).
    platform: the kind of device. cpu uses stand-ins for compiled code; npu_emulated runs what npu does, on a CPU.
    hardware: the kind of machine with NPUs: Atlas A3, 800T A2, or 200T A2 Box16 (docs/line-a3.md). For A2 plans have
    memory and layouts, but no seconds.
    level: set by level=NAME, with the keys of configs/level/NAME.yaml; rows of role speed are on at tuned alone.
    patches: +row.id or -row.id, which switch rows of the catalogue on or off; `*` stands for any text.
    drift: policy where upstream is not as reviewed: strict stops the run, warn marks the row and applies it if it can.
    dtype: dtype of training and rollout.
    ray_address: null starts a Ray on this machine; "auto" or HOST:PORT joins a running one.
    worker_process_setup_hook: a "package.module.function" that every Ray worker calls after the prelude and
    before Ray gives it a die. On npu it must not import torch_npu.
    expert_load: count the tokens of each expert in training; every step records max / mean.
    model_shape: HF config.json from which the plan reads sizes, relative to the configs folder.
    trust_remote_code: run the Python code of a tokenizer that is code in the model's folder (Moonlight, Kimi-K2). It
    becomes verl's two keys of that name, of data and of actor_rollout_ref.model.
    num_hidden_layers: train and serve only the model's first N layers; null: all. Embedding, final norm and head stay.
    The model's folder is not changed, whether its weights are read or random ones made. A layers_per_stage that is
    given for all layers is replaced by a balanced one.
    added_keys: keys, or sections, that verl's own file does not list, given as +key=value, which the user's code reads.
    resume_other_data: resume from a checkpoint of a run with other data (number of rows, bytes of the files).
    rewards: the parts of a response's reward (docs/reward.md). null takes the function of custom_reward_function, as
    one entry of name python would, or where that has no path verl's own scores by data source.
    """

    run: Name | None = "run"
    output_root: Text | None = None
    line: Annotated[str, choices(*LINES)] = "a3"
    platform: Annotated[str, choices(*PLATFORMS)] = "npu"
    hardware: Annotated[str, choices(*HARDWARE)] = "a3"
    level: Annotated[str, choices(*LEVELS)] = "tuned"
    patches: list[_Pattern] = field(default_factory=list)
    drift: Annotated[str, choices(*DRIFT_POLICIES)] = "strict"
    dtype: Annotated[str, choices(*VLLM_DTYPES)] = "bf16"
    ray_address: RayAddress | None = None
    worker_process_setup_hook: Dotted | None = None
    expert_load: bool = False
    model_shape: str = "model/deepseekv3_671b.json"
    trust_remote_code: bool = False
    num_hidden_layers: Count | None = None
    added_keys: list[Text] = field(default_factory=list)
    resume_other_data: bool = False
    data: Data = field(default_factory=Data)
    objective: Objective = field(default_factory=Objective)
    rewards: list[dict[str, Any]] | None = None
    train: Train = field(default_factory=Train)
    rollout: Rollout = field(default_factory=Rollout)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    reshard: Reshard = field(default_factory=Reshard)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    filter_groups: FilterGroups = field(default_factory=FilterGroups)
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
    """Return the section `recipe` as typed values; its keys and values must have passed `check_recipe`."""
    return _recipe_adapter().validate_python(section)


@functools.cache
def _recipe_adapter() -> TypeAdapter[Recipe]:
    return TypeAdapter(Recipe)


class Key(NamedTuple):
    """Describe a key of the section by its default (dataclasses.MISSING for a list) and its type."""

    default: Any
    kind: Any


def recipe_keys(schema: type = Recipe, prefix: str = "recipe") -> Iterator[tuple[str, Key]]:
    """Yield (dotted key, Key) of every leaf of the section, in order."""
    types = field_types(schema)
    for item in fields(schema):
        name, kind = f"{prefix}.{item.name}", types[item.name]
        if isinstance(kind, type) and is_dataclass(kind):
            yield from recipe_keys(kind, name)
        else:
            yield name, Key(item.default, kind)


# entries of recipe.rewards, which are the parts of a run's reward


FORMAT_WEIGHT, MAX_FORMAT_WEIGHT = 0.1, 0.5  # default and largest score of a wrong answer in the right form
CPU_LIMIT_S = 1.0  # limit of a comparison of two answers
REWARD_KEYS = {  # keys that an entry may have beside name and weight
    "maths": ("format_weight", "cpu_limit_s"),
    "by_source": ("format_weight", "cpu_limit_s"),
    "learnable": (),
    "format": (),
    "length": ("buffer_tokens",),
    "reward_model": ("path",),
    "python": ("path", "function", "kwargs", "timeout_s"),
    "data_source": (),
}


@dataclass
class Reward:
    """Describe one part of the reward, which is the sum of weight x score over all parts (rewards/manager.py).

    name: maths compares the last \\boxed{} of a response with the gold answer; learnable is the task of smoke --learn;
    by_source is learnable for rows of that task and maths for all others; format is 1 if the last \\boxed{} is closed
    and not empty, else 0; length is DAPO's penalty near the length limit, -1 at the limit (arXiv:2503.14476, eq. 13);
    reward_model is a model's score of prompt and response, at the last token; python calls a function with verl's
    compute_score contract; data_source is verl's own score by a row's data_source.
    weight: factor of the part's score. 0 only reports the part's mean.
    format_weight: score of a wrong answer in the right form, for maths and by_source.
    cpu_limit_s: CPU seconds of a comparison, for maths and by_source; an answer that takes more counts as wrong.
    buffer_tokens: the penalty of length begins this many tokens before data.max_response_length and falls linearly;
    null is a fifth of it, DAPO's share.
    path: the file of python, or for reward_model a folder with a score head, such as a checkpoint of algo=rm.
    function: name of python's function in the file.
    kwargs: keyword arguments of python's function.
    timeout_s: seconds for one response, after which python's function, which then runs in a process of its own, is
    killed and the response scores 0; null is no limit.
    """

    name: Annotated[str, choices(*REWARD_KEYS)]
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    format_weight: Annotated[float, Field(ge=0, le=MAX_FORMAT_WEIGHT)] = FORMAT_WEIGHT
    cpu_limit_s: Positive = CPU_LIMIT_S
    buffer_tokens: Count | None = None
    path: Text | None = None
    function: Text = "compute_score"
    kwargs: dict[str, Any] = field(default_factory=dict)
    timeout_s: Positive | None = None

    def penalty_tokens(self, longest: int) -> int:
        """Return the tokens over which the penalty of `length` falls, for responses of at most `longest` tokens."""
        return self.buffer_tokens or max(longest // 5, 1)


class Part(NamedTuple):
    """Hold an entry of the rewards, with its key in the configuration (`where`) and its name in metrics (`label`)."""

    where: str
    label: str
    entry: Reward

    @property
    def path(self) -> str:
        """Return the path of an entry of name python or reward_model, which rewards/parts.py requires."""
        assert self.entry.path is not None
        return self.entry.path

    def __str__(self) -> str:
        return f"{self.where} ({self.entry.name})"
