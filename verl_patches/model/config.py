"""HF config to Megatron config for DeepSeek-V3: verl's converter, plus what it leaves out, minus what it cannot know.

verl 0.4.0's `hf_to_mcore_config_dpskv3` (verl/models/mcore/config_converter.py:187) carries MLA and yarn over rightly,
but not group-limited routing, and takes a few things about the model for granted. Those are checked here, because a
wrong guess gives a model that runs and is wrong.
"""

from __future__ import annotations

from typing import Any

import torch
from verl.models.mcore.config_converter import hf_to_mcore_config_dpskv3
from verl.models.mcore.registry import SupportedModel

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import for_training

# (HF key, the only value verl's converter and Megatron's modules stand for)
_TAKEN_FOR_GRANTED = (
    ("scoring_func", "sigmoid"),
    ("topk_method", "noaux_tc"),
    ("norm_topk_prob", True),
    ("hidden_act", "silu"),
    ("attention_bias", False),
    ("moe_layer_freq", 1),
)


def deepseekv3_config(hf_config, dtype: torch.dtype, **overrides: Any):
    """MLATransformerConfig of a DeepSeek-V3 HF config, for parameters of `dtype`; `overrides` are its fields and win.

    Deviates from verl's converter: sets group-limited routing, computes the router in fp32 instead of fp64 (as the
    model was trained, and NPUs have no fp64), and leaves balancing to the model as it is: no auxiliary loss, and a
    correction bias that training does not move (both would change the model by something that is not the RL loss).
    Takes fp8 and MTP entries out of `hf_config`, in place (layout/model_folder.py). Raises ConfigError where the HF
    config is not what verl's converter takes for granted.
    """
    for_training(hf_config)
    check(hf_config)
    defaults: dict[str, Any] = {
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_bias_update_rate": 0.0,
    }
    if (getattr(hf_config, "n_group", None) or 1) > 1:
        defaults["moe_router_num_groups"] = hf_config.n_group
        defaults["moe_router_group_topk"] = hf_config.topk_group
    return hf_to_mcore_config_dpskv3(hf_config, dtype, **{**defaults, **overrides})


def check(hf_config) -> None:
    """ConfigError where `hf_config` is not a DeepSeek-V3 that verl's converter and Megatron compute rightly."""
    for key, expected in _TAKEN_FOR_GRANTED:
        found = getattr(hf_config, key, expected)
        if found != expected:
            raise ConfigError(f"HF config: {key} must be {expected!r} for DeepSeek-V3 on Megatron, found {found!r}")
    groups, of_groups = getattr(hf_config, "n_group", None) or 1, getattr(hf_config, "topk_group", None) or 1
    if groups > 1 and hf_config.num_experts_per_tok != 2 * of_groups:
        raise ConfigError(
            "HF config: num_experts_per_tok must be 2 * topk_group: "
            "Megatron ranks a group by its best num_experts_per_tok // topk_group experts, "
            f"transformers and vLLM by its best 2; found {hf_config.num_experts_per_tok} and {of_groups}"
        )
    yarn = getattr(hf_config, "rope_scaling", None)
    if not yarn:
        return
    if yarn.get("type") != "yarn":  # verl reads "type" alone and would silently take plain rope
        raise ConfigError(f'HF config: rope_scaling must hold "type": "yarn", found {yarn}')
    if yarn.get("mscale") != yarn.get("mscale_all_dim"):
        raise ConfigError(
            "HF config: rope_scaling.mscale and mscale_all_dim must be given and equal, "
            "because Megatron scales the softmax by mscale and transformers and vLLM by mscale_all_dim; "
            f"found {yarn.get('mscale')} and {yarn.get('mscale_all_dim')}"
        )


def converters() -> dict[SupportedModel, Any]:
    """Row provider: the entry for verl's MODEL_CONFIG_CONVERTER_REGISTRY."""
    return {SupportedModel.DEEPSEEK_V3: deepseekv3_config}
