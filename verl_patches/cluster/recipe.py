"""The typed `recipe:` section: what a run needs to say and verl's own configuration cannot hold.

Hydra merges it as a dataclass schema, so a key that is not here is refused by name. Keep it small: a key belongs here
only if some code acts on it. Workers of verl see it as `config.recipe` (the configs mirror it under actor_rollout_ref).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.patching.spec import DRIFT_POLICIES, LINES, PLATFORMS

VLLM_DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def _choice(default: str, *allowed: str) -> Any:
    return field(default=default, metadata={"allowed": allowed})


@dataclass
class Train:
    """The training layout beyond verl's megatron section.

    layers_per_stage: layers of each pipeline stage in model order, null splits evenly. expert_split: "etp" takes
    verl's expert_tensor_parallel_size as it is; "tp_extend_ep" says that whole experts are split over TP x EP ranks
    (expert_model_parallel_size counts them all, expert_tensor_parallel_size is 1; MindSpeed moe_tp_extend_ep).

    skip_old_log_prob: the update takes its own log-probs as the old ones, and the actor's pass for them is left out;
    refused where one update is more than one mini batch and one epoch (training/on_policy.py).

    swap_optimizer: optimizer states live on the host and come in pieces of whole tensors during the update, one piece
    at a time; it has at most 1/swap_optimizer_times of them, or one tensor (memory/swap_optimizer.py; a3: MindSpeed's).

    The rest is for line a3, where training/engine_table.py says what each becomes; line pypi refuses other values.
    grouped_gemm: all local experts in one kernel; false is refused. fused_rmsnorm, fused_swiglu, fused_rope,
    fused_permute: MindSpeed's fused kernels. fused_linear_wgrad, fused_expert_wgrad: weight gradients of linear layers
    and of experts are added to the fp32 gradients inside the product's kernel. unpadded_attention: attention takes
    values of v_head_dim as they are, instead of query, key and value padded to 256 (at 671B). alltoall_overlap: expert
    exchange beside computation. grad_overlap, param_overlap: DDP's exchanges beside computation; refused on both
    lines, as verl never waits for them. collective_timeout_minutes: when a collective of training is given up.
    router_bias_update_rate: step of the router's correction bias, 0 leaves it as the model has it. balanced_routing:
    every expert gets equally many tokens, whatever the router says (speed runs only). adam_beta1, adam_beta2,
    adam_eps: of Adam.
    """

    layers_per_stage: list[int] | None = None
    expert_split: str = _choice("etp", "etp", "tp_extend_ep")
    skip_old_log_prob: bool = False
    swap_optimizer: bool = False
    swap_optimizer_times: int = 16
    grouped_gemm: bool = True
    fused_rmsnorm: bool = True
    fused_swiglu: bool = True
    fused_rope: bool = True
    fused_permute: bool = True
    fused_linear_wgrad: bool = False
    fused_expert_wgrad: bool = False
    unpadded_attention: bool = False
    alltoall_overlap: bool = False
    grad_overlap: bool = False
    param_overlap: bool = False
    collective_timeout_minutes: int = 30
    router_bias_update_rate: float = 0.0
    balanced_routing: bool = False
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8


@dataclass
class Rollout:
    """The rollout layout beyond verl's rollout section.

    dp: data-parallel ranks inside one vLLM instance (experts are split over dp x tp); instances: null takes world /
    (dp x tp). balanced_routing: every expert gets equally many tokens, whatever the router says (speed runs on npu
    only). replay: run folder of recorded responses to train on. record: keep every step's responses in <run>/rollouts.
    """

    dp: int = 1
    instances: int | None = None
    expert_parallel: bool = False
    balanced_routing: bool = False
    replay: str | None = None
    record: bool = True


@dataclass
class WeightSync:
    """Training weights to vLLM before each rollout. enabled=false keeps vLLM at the weights of the first sync."""

    enabled: bool = True


@dataclass
class Reshard:
    """How weights are synced (rows reshard.*; without them verl's own path does it, and this says nothing).

    bucket_bytes: most that a rank sends, and receives, in one exchange; four such buffers are there during a sync.
    verify: off, first (the first sync of a run) or every. A verified sync poisons vLLM's weights with NaN first and
    compares checksums of every region over all ranks that hold it afterwards; once for each map it also has vLLM load
    what it holds again. That is some passes over the weights, with memory that the step table does not count. Whether
    log-probs agree is another question: recipe.logprob_check asks it, where the sampling lets it.
    """

    bucket_bytes: int = 512 << 20
    verify: str = _choice("first", "off", "first", "every")


@dataclass
class RolloutCorrection:
    """Policy gradient corrected for where vLLM's probabilities differ from the actor's; as in later verl, null is off.

    rollout_is: a token's gradient is weighed by pi_actor / pi_rollout of the token, or of its sequence, at most
    rollout_is_threshold. rollout_rs: a sequence gives no gradient where pi_rollout / pi_actor (the inverse,
    as in verl), multiplied over its tokens (seq_sum_k1) or as their geometric mean (seq_mean_k1), is outside
    rollout_rs_threshold: LOWEST_HIGHEST, such as 0.5_2.0, or the highest alone. How far both are apart is reported at
    every step, whatever stands here.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float = 2.0
    rollout_rs: str | None = None
    rollout_rs_threshold: str | None = None


@dataclass
class TensorCache:
    """enabled: what rollout, log-prob and reference make stays on the workers, in the order that the update computes;
    the trainer gets lengths and unpadded ids, and gives advantages. With trainer.balance_batch that order makes the
    micro batches of all train replicas equally long, in the same mini batches (comm/micro_batches.py), and with
    use_dynamic_bsz packs them within the token budget. Without balance_batch micro batches are verl's.
    """

    enabled: bool = False


@dataclass
class Memory:
    """ledger: every worker watches who is on the device in each phase, against the order's table (memory/phases.py):
    report logs and records what is not as expected, strict stops the run there, off does not look.
    """

    ledger: str = _choice("report", "off", "report", "strict")


@dataclass
class LogprobCheck:
    """vLLM's log-probs of sampled tokens against the actor's, every step: mean |delta| in nats, a limit a dtype.

    action: stop ends the run with an error, report only prints and stores, off does not look.
    """

    action: str = _choice("stop", "stop", "report", "off")
    max_mean_fp32: float = 1e-5
    max_mean_bf16: float = 0.05


@dataclass
class Timeouts:
    """When the launcher ends a run, in seconds: wall_s since its start, quiet_s since its last output; null: never."""

    wall_s: float | None = None
    quiet_s: float | None = None


@dataclass
class Recipe:
    """One run. It writes to <output_root>/<run>; `patches` are +row.id / -row.id switches of the catalogue.

    drift: what to do where upstream is not as a row was reviewed: strict stops the run, warn applies the row where it
    can and marks it, skip leaves upstream alone there.
    ray_address: null starts a Ray of its own on this machine, on ray_port (null: any free one); "auto" or HOST:PORT
    joins one that runs. worker_process_setup_hook: "package.module.function" of the user's, run in every Ray worker
    after the prelude, before Ray gives it a die (so on npu it may not import torch_npu). model_shape: HF config.json
    that the plan reads sizes from, relative to the configs folder.
    """

    run: str = "run"
    output_root: str = "outputs"
    line: str = _choice("a3", *LINES)
    platform: str = _choice("npu", *PLATFORMS)
    patches: list[str] = field(default_factory=list)
    drift: str = _choice("strict", *DRIFT_POLICIES)
    dtype: str = _choice("bf16", *VLLM_DTYPES)
    ray_address: str | None = None
    worker_process_setup_hook: str | None = None
    ray_port: int | None = None
    model_shape: str = "model/deepseekv3_671b.json"
    train: Train = field(default_factory=Train)
    rollout: Rollout = field(default_factory=Rollout)
    weight_sync: WeightSync = field(default_factory=WeightSync)
    reshard: Reshard = field(default_factory=Reshard)
    rollout_correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    tensor_cache: TensorCache = field(default_factory=TensorCache)
    memory: Memory = field(default_factory=Memory)
    logprob_check: LogprobCheck = field(default_factory=LogprobCheck)
    timeouts: Timeouts = field(default_factory=Timeouts)


def recipe_keys(schema: type = Recipe, prefix: str = "recipe") -> Iterator[tuple[str, Any]]:
    """(dotted key, dataclass field) of every leaf of the section, in order."""
    for item in fields(schema):
        name = f"{prefix}.{item.name}"
        section = item.default_factory if item.default_factory is not MISSING else None
        if is_dataclass(section):
            yield from recipe_keys(section, name)
        else:
            yield name, item


def check_recipe(section: Mapping[str, Any]) -> None:
    """ConfigError for a key that is not in the schema (with the nearest one) or a value outside its words or range."""
    known = dict(recipe_keys())
    given = dict(_leaves(section, "recipe", known))
    faults = [unknown_key(key, known) for key in given if key not in known]
    for key, item in known.items():
        allowed = item.metadata.get("allowed")
        if allowed and key in given and given[key] not in allowed:
            faults.append(f"{key} is {given[key]!r}; expected one of {', '.join(allowed)}")
    faults += _value_faults(given)
    if faults:
        raise ConfigError("recipe: " + "\n        ".join(faults))


def _value_faults(given: Mapping[str, Any]) -> list[str]:
    faults = []
    run = given.get("recipe.run", "run")
    if not run or run in (".", "..") or "/" in run or run.startswith("-"):
        faults.append(f"recipe.run is {run!r}; expected a plain folder name, such as smoke-ep2")
    for key in ("recipe.rollout.dp", "recipe.rollout.instances"):
        if given.get(key) is not None and given[key] < 1:
            faults.append(f"{key} is {given[key]}; expected a whole number >= 1")
    port = given.get("recipe.ray_port")
    if port is not None and not 1024 <= port <= 65535:
        faults.append(f"recipe.ray_port is {port}; expected 1024 to 65535, or null for a free one")
    if port is not None and given.get("recipe.ray_address") is not None:
        faults.append(
            "recipe.ray_port is for a Ray that the run starts itself, but recipe.ray_address joins one; "
            "remove one of them"
        )
    bucket = given.get("recipe.reshard.bucket_bytes", 1)
    if bucket < 1:
        faults.append(f"recipe.reshard.bucket_bytes is {bucket}; expected a whole number of bytes, such as {512 << 20}")
    platform = given.get("recipe.platform")
    if given.get("recipe.rollout.balanced_routing") and platform != "npu":
        faults.append(
            f"recipe.rollout.balanced_routing is vllm-ascend's: it needs recipe.platform=npu, found {platform}"
        )
    minutes = given.get("recipe.train.collective_timeout_minutes", 1)
    if minutes < 1:
        faults.append(f"recipe.train.collective_timeout_minutes is {minutes}; expected a whole number >= 1")
    line = given.get("recipe.line")
    if given.get("recipe.train.balanced_routing") and line != "a3":
        faults.append(f"recipe.train.balanced_routing is MindSpeed-LLM's: it needs recipe.line=a3, found {line}")
    faults += [f"recipe.timeouts.{key} is {given[f'recipe.timeouts.{key}']}; expected seconds > 0, or null"
               for key in ("wall_s", "quiet_s") if (given.get(f"recipe.timeouts.{key}") or 1) <= 0]
    faults += [f"recipe.patches holds {pattern!r}; expected +row.id or -row.id"
               for pattern in given.get("recipe.patches", ()) if pattern[:1] not in ("+", "-") or len(pattern) < 2]
    return faults


def unknown_key(key: str, known: Mapping[str, Any]) -> str:
    """One sentence about a key that does not exist, with the nearest ones that do."""
    leaf = key.rpartition(".")[2]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.75)
    near += [name for name in known if name.rpartition(".")[2] == leaf and name not in near]
    hint = f"did you mean {' or '.join(near[:3])}?" if near else "the keys are those of verl_patches/cluster/recipe.py"
    return f"unknown key {key}; {hint}"


def _leaves(section: Mapping[str, Any], prefix: str, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        name = f"{prefix}.{key}"
        if isinstance(value, Mapping) and name not in known:
            yield from _leaves(value, name, known)
        else:
            yield name, value
