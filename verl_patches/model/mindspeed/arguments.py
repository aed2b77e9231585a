"""HF config to MindSpeed-LLM arguments for DeepSeek-V3: one table, torch-free.

MindSpeed-LLM's modules read sizes and switches by `get_args()`, not from a configuration object, so the model is said
in its command-line arguments. Every HF key is in one of the tables: carried over, checked to have the one value that
these modules compute, or known not to matter. Any other is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError


class Setting(NamedTuple):
    """One explained row: where a value comes from, what it becomes, and why.

    `how`: mapped (to `arguments`), fixed (always `arguments`), verl's own (no argument), with KEY (that row's arguments
    say it), refused (`why` is the reason).
    """

    key: str
    value: Any
    how: str
    arguments: tuple[str, ...]
    why: str


# HF key -> argument that takes its value
SIZES = {
    "num_hidden_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "max_position_embeddings": "--max-position-embeddings",
    "rms_norm_eps": "--norm-epsilon",
    "initializer_range": "--init-method-std",
    "rope_theta": "--rotary-base",
    "vocab_size": "--padded-vocab-size",
    "q_lora_rank": "--q-lora-rank",
    "kv_lora_rank": "--kv-lora-rank",
    "qk_nope_head_dim": "--qk-nope-head-dim",
    "qk_rope_head_dim": "--qk-rope-head-dim",
    "v_head_dim": "--v-head-dim",
    "n_routed_experts": "--num-experts",
    "num_experts_per_tok": "--moe-router-topk",
    "n_shared_experts": "--n-shared-experts",
    "moe_intermediate_size": "--moe-intermediate-size",
    "first_k_dense_replace": "--first-k-dense-replace",
    "moe_layer_freq": "--moe-layer-freq",
    "n_group": "--n-group",
    "topk_group": "--topk-group",
    "routed_scaling_factor": "--routed-scaling-factor",
}
YARN = {
    "factor": "--rope-scaling-factor",
    "beta_fast": "--rope-scaling-beta-fast",
    "beta_slow": "--rope-scaling-beta-slow",
    "mscale": "--rope-scaling-mscale",
    "mscale_all_dim": "--rope-scaling-mscale-all-dim",
    "original_max_position_embeddings": "--rope-scaling-original-max-position-embeddings",
}
# HF key, the only value that is computed rightly, arguments that say so
ONLY = (
    ("model_type", "deepseek_v3", ("--multi-head-latent-attention", "--qk-layernorm")),
    ("scoring_func", "sigmoid", ("--moe-router-score-function", "sigmoid")),
    ("topk_method", "noaux_tc", ("--moe-router-load-balancing-type", "noaux_tc", "--moe-router-enable-expert-bias")),
    ("norm_topk_prob", True, ("--norm-topk-prob",)),
    ("hidden_act", "silu", ("--swiglu",)),
    ("attention_bias", False, ("--disable-bias-linear",)),
    ("attention_dropout", 0, ("--attention-dropout", "0")),
    ("tie_word_embeddings", False, ("--untie-embeddings-and-output-weights",)),
    ("num_nextn_predict_layers", 0, ()),
    ("quantization_config", None, ()),
    ("rope_interleave", True, ()),
)
# keys of config.json that change nothing about the training computation
NO_MATTER = frozenset({
    "_name_or_path", "architectures", "auto_map", "torch_dtype", "transformers_version",  # of transformers
    "bos_token_id", "eos_token_id", "pad_token_id", "use_cache",  # of generation, which is vLLM's
    "aux_loss_alpha", "seq_aux",  # of balancing: FIXED says why there is none
    "ep_size", "pretraining_tp",  # of layouts, which are verl's and recipe.train's
    "head_dim", "qk_head_dim",  # transformers derives them from the sizes above
})  # fmt: skip
FIXED = (
    (("--use-mcore-models",), "MindSpeed-LLM has MoE and MLA for Megatron core models only"),
    (("--normalization", "RMSNorm"), "DeepSeek-V3's norm"),
    (("--position-embedding-type", "rope", "--rope-scaling-type", "yarn"), "DeepSeek-V3's positions"),
    (("--no-rope-fusion",), "that fusion is apex's; MindSpeed's own is --use-fused-rotary-pos-emb"),
    (("--no-masked-softmax-fusion", "--use-flash-attn"), "attention is npu_fusion_attention, with no softmax outside"),
    (("--hidden-dropout", "0"), "DeepSeek-V3 has none"),
    (("--moe-aux-loss-coeff", "0"), "balancing would change the model by something that is not the RL loss"),
    (("--tokenizer-type", "NullTokenizer", "--vocab-size", "1"), "verl tokenizes; validators want some tokenizer"),
)
_DECIDED = {*SIZES, *(key for key, _, _ in ONLY), *NO_MATTER, "num_key_value_heads", "rope_scaling"}


def model_settings(hf_config: Mapping[str, Any]) -> list[Setting]:
    """Explained rows of the HF config (its config.json as a mapping); a refused row has its reason in `why`."""
    hf = dict(hf_config)
    found = [_size(key, argument, hf) for key, argument in SIZES.items()]
    found += [_only(key, expected, arguments, hf.get(key)) for key, expected, arguments in ONLY]
    found += [_refused(key, value, "no table of model/mindspeed/arguments.py says what it becomes")
              for key, value in hf.items() if key not in _DECIDED]
    heads, kv_heads = hf.get("num_attention_heads"), hf.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        found.append(_refused("num_key_value_heads", kv_heads, f"MLA has one key for each of {heads} heads"))
    yarn = hf.get("rope_scaling") or {}
    if (yarn.get("type") or yarn.get("rope_type")) != "yarn":
        found.append(_refused("rope_scaling", yarn or None, "MindSpeed-LLM sizes MLA's rotary part by its yarn only"))
    else:
        found += [_size(f"rope_scaling.{key}", argument, {f"rope_scaling.{key}": yarn.get(key)})
                  for key, argument in YARN.items()]
        found += [_refused(f"rope_scaling.{key}", value, "MindSpeed-LLM's yarn has no such setting")
                  for key, value in yarn.items() if key not in {*YARN, "type", "rope_type"}]
    found += [Setting("always", None, "fixed", arguments, why) for arguments, why in FIXED]
    return [row._replace(key=f"HF {row.key}") if row.key != "always" else row for row in found]


def arguments_of(settings: list[Setting]) -> list[str]:
    """The command line that `settings` say; ConfigError names every refused row."""
    refused = [f"{row.key} is {row.value!r}: {row.why}" for row in settings if row.how == "refused"]
    if refused:
        raise ConfigError("engine start on line a3 refuses\n  " + "\n  ".join(refused))
    return [argument for row in settings for argument in row.arguments]


def _size(key: str, argument: str, hf: Mapping[str, Any]) -> Setting:
    value = hf.get(key)
    if value is None:
        return _refused(key, value, f"{argument} needs it; DeepSeek-V3's config.json has it")
    number = int(value) if float(value).is_integer() else value  # some arguments are whole numbers, as --rotary-base
    return Setting(key, value, "mapped", (argument, str(number)), "")


def _only(key: str, expected: Any, arguments: tuple[str, ...], value: Any) -> Setting:
    if value is None or value == expected:
        why = "as it must be; another value is refused" if value == expected else f"left out, which means {expected!r}"
        return Setting(key, value, "mapped", arguments, why)
    return _refused(key, value, f"must be {expected!r} for DeepSeek-V3 on MindSpeed-LLM")


def _refused(key: str, value: Any, why: str) -> Setting:
    return Setting(key, value, "refused", (), why)
