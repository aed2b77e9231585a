"""Map HF config, verl's configuration and `recipe:` to Megatron and MindSpeed(-LLM) arguments, by key (line a3).

MindSpeed-LLM's modules read sizes and switches by `get_args()`, not from a configuration object, so the model and the
training engine are described by command-line arguments:

    model_settings          HF keys, by the tables SIZE_ARGUMENTS to MODEL_ARGUMENTS below
    engine_settings         engine keys of verl and `recipe.train`, by TABLE and ENGINE_ARGUMENTS; HF keys too
    command_line_arguments  the command line that these settings give, or ConfigError

Every key is mapped to arguments, required to have the one value that these modules compute, read by verl or by our own
code, or known to have no effect. Any other key is refused by name, so that none is dropped. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import REQUIRED_VALUES, YARN_KEYS
from verl_patches.recipe import Recipe
from verl_patches.values import leaves


class Setting(NamedTuple):
    """Explain one key of a configuration: its value, the arguments it becomes, and why.

    `how`: mapped (to `arguments`), fixed (always `arguments`), verl's own (no argument), with KEY (part of that row's
    arguments), refused (`why` is the reason).
    """

    key: str
    value: Any
    how: str
    arguments: tuple[str, ...]
    why: str


# HF keys whose argument does not have their name
_OTHER_NAMES = {
    "num_hidden_layers": "--num-layers",
    "intermediate_size": "--ffn-hidden-size",
    "rms_norm_eps": "--norm-epsilon",
    "initializer_range": "--init-method-std",
    "rope_theta": "--rotary-base",
    "vocab_size": "--padded-vocab-size",
    "n_routed_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
}
_SIZE_KEYS = """
num_hidden_layers hidden_size intermediate_size num_attention_heads max_position_embeddings rms_norm_eps
initializer_range rope_theta vocab_size q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim
n_routed_experts num_experts_per_tok n_shared_experts moe_intermediate_size first_k_dense_replace moe_layer_freq
n_group topk_group routed_scaling_factor
""".split()
SIZE_ARGUMENTS = {key: _OTHER_NAMES.get(key, f"--{key.replace('_', '-')}") for key in _SIZE_KEYS}
YARN_ARGUMENTS = {key: f"--rope-scaling-{key.replace('_', '-')}" for key in YARN_KEYS}
# arguments for keys of config.json that have one accepted value; MTP, fp8 and interleaved positions have no argument
REQUIRED_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "model_type": ("--multi-head-latent-attention", "--qk-layernorm"),
    "scoring_func": ("--moe-router-score-function", "sigmoid"),
    "topk_method": ("--moe-router-load-balancing-type", "noaux_tc", "--moe-router-enable-expert-bias"),
    "norm_topk_prob": ("--norm-topk-prob",),
    "hidden_act": ("--swiglu",),
    "attention_bias": ("--disable-bias-linear",),
    "attention_dropout": ("--attention-dropout", "0"),
    "tie_word_embeddings": ("--untie-embeddings-and-output-weights",),
}
# keys of config.json without effect on the training computation
IGNORED_KEYS = frozenset({
    "_name_or_path", "architectures", "auto_map", "torch_dtype", "transformers_version",  # keys of transformers
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",  # keys of generation, which vLLM does
    "aux_loss_alpha", "seq_aux",  # keys of balancing, which MODEL_ARGUMENTS switches off
    "ep_size", "pretraining_tp",  # keys of layouts, which verl and recipe.train give
    "head_dim", "qk_head_dim",  # transformers derives them from the sizes above
})  # fmt: skip
MODEL_ARGUMENTS = (
    (("--use-mcore-models",), "MindSpeed-LLM has MoE and MLA for Megatron core models only"),
    (("--normalization", "RMSNorm"), "DeepSeek-V3's norm"),
    (("--position-embedding-type", "rope", "--rope-scaling-type", "yarn"), "DeepSeek-V3's positions"),
    (("--no-rope-fusion",), "that fusion is apex's; MindSpeed's own is --use-fused-rotary-pos-emb"),
    (("--no-masked-softmax-fusion", "--use-flash-attn"), "attention is npu_fusion_attention, with no softmax outside"),
    (("--hidden-dropout", "0"), "DeepSeek-V3 has no dropout"),
    (("--moe-aux-loss-coeff", "0"), "balancing would change the model by something that is not the RL loss"),
    (("--tokenizer-type", "NullTokenizer", "--vocab-size", "1"), "verl tokenizes; validators require a tokenizer"),
)
_KNOWN_HF_KEYS = {*SIZE_ARGUMENTS, *REQUIRED_VALUES, *IGNORED_KEYS, "num_key_value_heads", "rope_scaling"}


def model_settings(hf_config: Mapping[str, Any]) -> list[Setting]:
    """Return the settings of an HF config (its config.json as a mapping); a refused one has its reason in `why`."""
    hf = dict(hf_config)
    if hf.get("q_lora_rank") is None:
        hf["q_lora_rank"] = hf.get("hidden_size")  # model.InputAndLatent: the query's down projection is the identity
    settings = [_size_setting(key, argument, hf) for key, argument in SIZE_ARGUMENTS.items()]
    settings += [
        _required_setting(key, expected, REQUIRED_ARGUMENTS.get(key, ()), hf.get(key))
        for key, expected in REQUIRED_VALUES.items()
    ]
    unknown = {key: value for key, value in hf.items() if key not in _KNOWN_HF_KEYS}
    settings += [_refusal(*item, f"unknown key; {_UNMAPPED_REMEDY}") for item in unknown.items()]
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        settings.append(_refusal("num_key_value_heads", kv_heads, f"must be {heads}, as MLA has one key for each head"))
    yarn = hf.get("rope_scaling") or {}
    if (yarn.get("type") or yarn.get("rope_type")) != "yarn":
        settings.append(
            _refusal("rope_scaling", yarn or None, 'must hold "type": "yarn", as MLA in MindSpeed-LLM needs')
        )
    else:
        prefixed = {f"rope_scaling.{key}": value for key, value in yarn.items() if key not in ("type", "rope_type")}
        sizes = {f"rope_scaling.{key}": argument for key, argument in YARN_ARGUMENTS.items()}
        settings += [_size_setting(key, argument, prefixed) for key, argument in sizes.items()]
        unknown = {key: value for key, value in prefixed.items() if key not in sizes}
        settings += [_refusal(*item, "MindSpeed-LLM's yarn has no such setting") for item in unknown.items()]
    settings += [Setting("always", None, "fixed", arguments, why) for arguments, why in MODEL_ARGUMENTS]
    return [row._replace(key=f"HF {row.key}") if row.key != "always" else row for row in settings]


def command_line_arguments(settings: list[Setting]) -> list[str]:
    """Return the command line of `settings`, or raise ConfigError, which names every refused one."""
    refused = [f"{row.key} is {row.value!r}: {row.why}" for row in settings if row.how == "refused"]
    if refused:
        raise ConfigError("line a3's training engine does not support these settings:\n  " + "\n  ".join(refused))
    return [argument for row in settings for argument in row.arguments]


def _size_setting(key: str, argument: str, hf: Mapping[str, Any]) -> Setting:
    value = hf.get(key)
    if value is None:
        return _refusal(key, value, f"{argument} requires a value; copy it from DeepSeek-V3's config.json")
    number = int(value) if float(value).is_integer() else value  # arguments such as --rotary-base take integers
    return Setting(key, value, "mapped", (argument, str(number)), "")


def _required_setting(key: str, expected: Any, arguments: tuple[str, ...], value: Any) -> Setting:
    if value is None or value == expected:
        why = "the only supported value" if value == expected else f"a missing key means {expected!r}"
        return Setting(key, value, "mapped", arguments, why)
    return _refusal(key, value, f"must be {expected!r} for DeepSeek-V3 on MindSpeed-LLM")


def _refusal(key: str, value: Any, why: str) -> Setting:
    return Setting(key, value, "refused", (), why)


Get = Callable[[str], Any]
_A, _O, _R, _M = "actor.megatron.", "actor.optim.", "recipe.train.", "model.gradient_checkpointing_kwargs."


class Key(NamedTuple):
    """Say how `key` of a configuration is mapped; `target` is an argument, or function(value, get) -> arguments.

    how: value (`target` VALUE), switch (`target` if true), convert (the function; its ConfigError is the reason of a
    refusal), verl (verl's own), with (another key's conversion reads it), only (`target` is the tuple of accepted
    values; others are refused with `why`).
    """

    key: str
    how: str
    target: Any
    why: str


def _expert_args(ep: int, get: Get) -> list[str]:
    tp = get("actor.megatron.tensor_model_parallel_size")
    etp = _none_as_null(get("actor.megatron.expert_tensor_parallel_size"))
    if get("recipe.train.expert_split") == "tp_extend_ep":
        if etp not in (None, 1):
            raise ConfigError(f"tp_extend_ep keeps experts whole: expected expert_tensor_parallel_size 1, found {etp}")
        if ep % tp:
            raise ConfigError(f"with expert_split=tp_extend_ep it counts TP x EP ranks: expected a multiple of TP {tp}")
        arguments = ["--expert-model-parallel-size", str(ep // tp)]
        return [*arguments, "--moe-tp-extend-ep"] if tp > 1 else arguments
    if etp not in (None, tp):
        raise ConfigError(
            f"Megatron core_r0.8.0 splits each expert by TP: expected expert_tensor_parallel_size {tp}, found {etp}; "
            "for whole experts over TP x EP ranks set recipe.train.expert_split=tp_extend_ep"
        )
    return ["--expert-model-parallel-size", str(ep)]


def _layer_list_args(counts: list[int] | None, get: Get) -> list[str]:
    if not counts or get("actor.megatron.pipeline_model_parallel_size") == 1:
        return []
    return ["--num-layer-list", ",".join(map(str, counts))]


def _sequence_parallel_args(on: bool, get: Get) -> list[str]:
    tp = get("actor.megatron.tensor_model_parallel_size")
    if tp > 1 and not on:
        raise ConfigError(
            "under TP it must be true: without it MindSpeed-LLM's MLA loses part of the rotary key's gradient, and its "
            "router takes each token TP times"
        )
    return ["--sequence-parallel"] if tp > 1 else []


def _context_parallel_args(size: int, get: Get) -> list[str]:
    if size == 1:
        return ["--variable-seq-lengths"]
    tokens = get("rollout.response_length") + get("rollout.prompt_length")
    if tokens % size:
        raise ConfigError(f"prompt_length + response_length must be a multiple of it, found {tokens} tokens")
    if get("recipe.train.routing_replay"):
        raise ConfigError(
            "not supported with routing replay: a rank would record the experts of its own part of a micro batch, "
            "which is a different part in the update. Set recipe.train.routing_replay=null"
        )
    return ["--context-parallel-size", str(size), "--context-parallel-algo", "ulysses_cp_algo"]


def _recompute_args(on: bool, get: Get) -> list[str]:
    if not on:
        return []
    values = {name: get(f"{_M}activations_checkpoint_{name}") for name in ("granularity", "method", "num_layers")}
    if not values["granularity"]:
        raise ConfigError("activations_checkpoint_granularity must be full or selective")
    number, stages = values["num_layers"], get(_A + "pipeline_model_parallel_size")
    if values["granularity"] == "full" and number is None:
        raise ConfigError("activations_checkpoint_num_layers must be a number of layers, one for each stage, or auto")
    if isinstance(number, list):  # start.py gives each rank the number of its own stage
        if len(number) != stages or values["method"] != "block":
            raise ConfigError(
                f"activations_checkpoint_num_layers has {len(number)} numbers; expected one for each of {stages} "
                "pipeline stages, with activations_checkpoint_method=block"
            )
        values["num_layers"] = number = max(number)
    if number == 0:
        return []
    given = {f"--recompute-{name.replace('_', '-')}": value for name, value in values.items() if value is not None}
    return [word for argument, value in given.items() for word in (argument, str(value))]


def _linear_wgrad_args(on: bool, get: Get) -> list[str]:
    # Megatron's default is fusion by apex's kernel, which MindSpeed's adaptor replaces by npu_matmul_add_fp32
    return [] if on else ["--no-gradient-accumulation-fusion"]


def _swap_args(on: bool, get: Get) -> list[str]:
    if on and get("recipe.dtype") == "fp32":
        raise ConfigError(
            "MindSpeed's optimizer swap does not support fp32 weights "
            "(mindspeed.core.optimizer.swap_optimizer.swap_adamw_step): set recipe.dtype=bf16"
        )
    if on and get("actor.megatron.optimizer_offload"):
        raise ConfigError(
            "the states are on the host already, and verl's optimizer_offload looks for them on the device: "
            "set actor.megatron.optimizer_offload=false"
        )
    return ["--swap-optimizer"] if on else []


def _schedule_args(style: str, get: Get) -> list[str]:
    steps, lr = get("actor.optim.total_training_steps"), float(get("actor.optim.lr"))
    ratio, warmup = get("actor.optim.lr_warmup_steps_ratio") or 0.0, _none_as_null(get("actor.optim.lr_warmup_steps"))
    warmup = warmup if warmup is not None and warmup >= 0 else int(ratio * max(steps, 0))
    if steps > 0 and warmup >= steps:
        raise ConfigError(f"expected fewer warm-up steps than total_training_steps {steps}, found {warmup}")
    total = max(steps, warmup + 1)  # steps is -1 until verl's trainer sets it
    minimum = lr * (get("actor.optim.min_lr_ratio") or 0.0)
    words = f"--lr-warmup-iters {warmup} --min-lr {minimum!r} --train-iters {total} --lr-decay-iters {total}"
    return ["--lr-decay-style", style, *words.split()]


def _dtype_args(dtype: str, get: Get) -> list[str]:
    # Validators accept grouped GEMM in bf16 only (megatron.training.arguments.validate_args): start.py sets fp32 after
    # them. In fp32 MindSpeed's router would free its own weight, which it believes to be an fp32 copy
    # (mindspeed_llm.core.transformer.moe.router.topk_router_gating_func).
    return ["--bf16", "--router-gating-in-fp32"] if dtype == "bf16" else ["--bf16"]


def _length_args(responses: int, get: Get) -> list[str]:
    return ["--seq-length", str(responses + get("rollout.prompt_length"))]


def _none_as_null(value: Any) -> Any:
    return None if value in (None, "None") else value  # verl's configuration file has the string None for null


_UNMAPPED_REMEDY = "remove it, or map it in model/mindspeed/arguments.py"
_PHASES_REASON = "verl moves it between phases (verl/workers/megatron_workers.py)"
_FUSED_REASON = "MindSpeed's fused kernel"
_DCP_REASON = "must be off, as Megatron 0.8.0's distributed checkpoint does not support MindSpeed's stacked experts"
_RECIPE_REASON = "must be empty, as MindSpeed-LLM does not read it; use recipe.train and gradient_checkpointing_kwargs"

TABLE: tuple[Key, ...] = (
    Key(_A + "tensor_model_parallel_size", "value", "--tensor-model-parallel-size", "TP"),
    Key(_A + "pipeline_model_parallel_size", "value", "--pipeline-model-parallel-size", "PP"),
    Key(_A + "virtual_pipeline_model_parallel_size", "only", (None, 1),
        "must be null or 1, as MindSpeed-LLM takes no layer list with virtual stages, and weight names lack the stage"),
    Key(_A + "context_parallel_size", "convert", _context_parallel_args,
        "Ulysses: ranks exchange parts of tokens for parts of heads around attention. Each micro batch has a length of "
        "its own; start.py sets that after the validators, which forbid it "
        "(mindspeed_llm.training.arguments._validate_instruction_finetune)"),
    Key(_A + "expert_model_parallel_size", "convert", _expert_args,
        "here it counts the ranks that experts are split over; MindSpeed's EP leaves out TP where TP extends it"),
    Key(_A + "expert_tensor_parallel_size", "with", _A + "expert_model_parallel_size", ""),
    Key(_A + "sequence_parallel", "convert", _sequence_parallel_args, "no effect at TP 1, required above"),
    Key(_A + "use_distributed_optimizer", "switch", "--use-distributed-optimizer", "optimizer states split over DP"),
    Key(_A + "param_offload", "verl", None, _PHASES_REASON),
    Key(_A + "grad_offload", "verl", None, "verl 54c9b736 never reads it: gradients move with parameters"),
    Key(_A + "optimizer_offload", "verl", None, _PHASES_REASON),
    Key(_A + "use_dist_checkpointing", "only", (False,), _DCP_REASON),
    Key(_A + "dist_checkpointing_path", "only", (None,), _DCP_REASON),
    Key(_A + "seed", "value", "--seed", "seed of weights that are not loaded"),
    Key(_A + "override_transformer_config", "only", (None, {}), _RECIPE_REASON),
    Key(_O + "lr", "value", "--lr", "learning rate"),
    Key(_O + "clip_grad", "value", "--clip-grad", "gradient norm limit"),
    Key(_O + "weight_decay", "value", "--weight-decay", ""),
    Key(_O + "warmup_style", "convert", _schedule_args, "Megatron's scheduler; verl has none at this commit"),
    Key(_O + "lr_warmup_steps", "with", _O + "warmup_style", "a negative one means lr_warmup_steps_ratio of all steps"),
    Key(_O + "lr_warmup_steps_ratio", "with", _O + "warmup_style", ""),
    Key(_O + "min_lr_ratio", "with", _O + "warmup_style", "fraction of lr"),
    Key(_O + "total_training_steps", "with", _O + "warmup_style", "verl's trainer sets it"),
    Key("model.enable_gradient_checkpointing", "convert", _recompute_args, "recompute activations"),
    Key(_M + "activations_checkpoint_granularity", "with", "model.enable_gradient_checkpointing", ""),
    Key(_M + "activations_checkpoint_method", "with", "model.enable_gradient_checkpointing", ""),
    Key(_M + "activations_checkpoint_num_layers", "with", "model.enable_gradient_checkpointing", "layers of a stage"),
    Key("recipe.dtype", "convert", _dtype_args, "dtype of weights; fp32 is set after the validators, which need bf16"),
    Key("rollout.response_length", "convert", _length_args, "prompt + response; at most the model's positions"),
    Key("rollout.prompt_length", "with", "rollout.response_length", ""),
    Key(_R + "layers_per_stage", "convert", _layer_list_args, "uneven pipeline stages; null splits evenly"),
    Key(_R + "expert_split", "with", _A + "expert_model_parallel_size", ""),
    Key(_R + "swap_optimizer", "convert", _swap_args, "optimizer states live on the host"),
    Key(_R + "swap_optimizer_times", "value", "--swap-optimizer-times", "pieces that states are swapped in"),
    Key(_R + "use_fused_rmsnorm", "switch", "--use-fused-rmsnorm", _FUSED_REASON),
    Key(_R + "use_fused_swiglu", "switch", "--use-fused-swiglu", _FUSED_REASON),
    Key(_R + "use_fused_rotary_pos_emb", "switch", "--use-fused-rotary-pos-emb", _FUSED_REASON),
    Key(_R + "use_fused_moe_token_permute_and_unpermute", "switch", "--use-fused-moe-token-permute-and-unpermute",
        _FUSED_REASON),
    Key(_R + "gradient_accumulation_fusion", "convert", _linear_wgrad_args,
        "linear layers add their weight gradients to fp32 main_grad in the product's kernel (npu_matmul_add_fp32)"),
    Key(_R + "gemm_gradient_accumulation_fusion", "switch", "--gemm-gradient-accumulation-fusion",
        "the same for grouped experts (npu_groupmatmul_add_fp32)"),
    Key(_R + "unpadded_attention", "switch", "--mla-fa-without-pad",
        "values keep v_head_dim; otherwise query, key and value are padded to a multiple of 128, 256 at 671B"),
    Key(_R + "moe_alltoall_overlap_comm", "switch", "--moe-alltoall-overlap-comm", "the experts' exchange overlaps"),
    Key(_R + "distributed_timeout_minutes", "value", "--distributed-timeout-minutes",
        "timeout of torch.distributed and of every group; verl's worker sets none at this commit"),
    Key(_R + "moe_router_bias_update_rate", "value", "--moe-router-bias-update-rate",
        "0 leaves the model's correction bias alone"),
    Key(_R + "balanced_routing", "switch", "--fix-router", "equally many tokens an expert: speed runs only"),
    Key(_R + "adam_beta1", "value", "--adam-beta1", ""),
    Key(_R + "adam_beta2", "value", "--adam-beta2", ""),
    Key(_R + "adam_eps", "value", "--adam-eps", ""),
)  # fmt: skip
ENGINE_ARGUMENTS = (
    (("--micro-batch-size", "1"), "verl makes the micro batches"),
    (("--moe-token-dispatcher-type", "alltoall", "--moe-permutation-async-comm"),
     "without the second MindSpeed leaves Megatron's dispatcher in place, which does not know moe_tp_extend_ep"),
    (("--moe-grouped-gemm",), "experts are stacked in weight1 and weight2"),
    (("--distributed-backend", "nccl"), "torch_npu turns it into hccl, platform cpu into gloo"),
)  # fmt: skip


def engine_settings(section: Any, recipe: Recipe, hf_config: Mapping[str, Any] | None = None) -> list[Setting]:
    """Return the setting of every engine key of a run, in TABLE's order; refused keys are settings too.

    section: verl's actor_rollout_ref. With `hf_config` (config.json as a mapping) the model's keys follow.
    `command_line_arguments` turns the settings into a command line, or raises.
    """
    values = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_config(section) else section
    values = {**values, "recipe": asdict(recipe)}
    given = dict(leaves(values, ends=lambda key: key.endswith("override_transformer_config")))
    rows = [_engine_setting(row, given.get) for row in TABLE]
    known = {row.key for row in TABLE}
    unknown = {key: value for key, value in given.items() if key.startswith((_A, _O, _M)) and key not in known}
    rows += [_refusal(*item, f"unknown key; {_UNMAPPED_REMEDY}") for item in unknown.items()]
    rows += [Setting("always", None, "fixed", arguments, why) for arguments, why in ENGINE_ARGUMENTS]
    return rows + (model_settings(hf_config) if hf_config is not None else [])


def _engine_setting(row: Key, get: Get) -> Setting:
    value = get(row.key)

    def setting(how: str, *arguments: str, why: str = row.why) -> Setting:
        return Setting(row.key, value, how, arguments, why)

    if row.how in ("with", "verl"):
        return setting(f"with {row.target}" if row.how == "with" else "verl's own")
    if row.how == "only":
        return setting("mapped", why=f"a supported value ({row.why})") if value in row.target else setting("refused")
    if row.how == "convert":
        try:
            return setting("mapped", *row.target(value, get))
        except ConfigError as error:
            return setting("refused", why=str(error))
    if row.how == "switch":
        return setting("mapped", row.target) if value else setting("mapped")
    if value is None:
        return setting("refused", why=f"{row.target} requires a value")
    return setting("mapped", row.target, str(value))
