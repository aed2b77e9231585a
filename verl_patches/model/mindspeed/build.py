"""DeepSeek-V3 for verl's registries on line a3: config converter and model initializer.

Both build from the arguments that engine start gave Megatron (training/engine_start.py), because MindSpeed-LLM's
modules read those whatever a TransformerConfig says.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import ModuleSpec
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from verl.models.mcore.model_initializer import BaseModelInitializer
from verl.models.mcore.registry import SupportedModel

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import for_training
from verl_patches.model.mindspeed.router_bias import keep_fp32_when_cast


def config_of_arguments(hf_config: Any, dtype: torch.dtype, **overrides: Any):
    """TransformerConfig of the model that engine start was told of, which must be `hf_config`'s, in `dtype`.

    Takes fp8 and MTP entries out of `hf_config`, in place (layout/model_folder.py). Raises ConfigError for another
    model or dtype, and for `overrides`, which MindSpeed-LLM's modules would not see.
    """
    for_training(hf_config)
    args = get_args()
    if overrides:
        raise ConfigError(f"override_transformer_config holds {sorted(overrides)}: on line a3 use recipe.train instead")
    if dtype != args.params_dtype:
        raise ConfigError(f"the model is asked for in {dtype}, the engine was started for {args.params_dtype}")
    for key, expected in (("hidden_size", args.hidden_size), ("num_hidden_layers", args.num_layers),
                          ("n_routed_experts", args.num_experts), ("vocab_size", args.padded_vocab_size)):  # fmt: skip
        if getattr(hf_config, key) != expected:
            raise ConfigError(f"HF config: {key} is {getattr(hf_config, key)}, the engine was started for {expected}")
    config = core_transformer_config_from_args(args)
    config.pipeline_dtype = config.params_dtype
    return config


class MindSpeedModel(BaseModelInitializer):
    """MindSpeed-LLM's DeepSeek layers in Megatron's GPTModel, with the attention of attention.py."""

    def get_transformer_layer_spec(self) -> ModuleSpec:
        """A copy of MindSpeed-LLM's DeepSeek spec; its module reads the arguments when it is imported."""
        from mindspeed_llm.tasks.models.spec.deepseek_spec import layer_spec

        from verl_patches.model.mindspeed.attention import CausalMlaAttention

        spec = copy.deepcopy(layer_spec)
        spec.submodules.self_attention.submodules.core_attention = CausalMlaAttention
        return spec

    def initialize(self, pre_process: bool = True, post_process: bool = True, value: bool = False,
                   **unused: Any) -> GPTModel:  # fmt: skip
        """This stage's model; ConfigError for a value model, which GRPO does not need."""
        if value:
            raise ConfigError("DeepSeek-V3 cannot be a value model: set algorithm.adv_estimator=grpo")
        args = get_args()
        model = GPTModel(
            config=self.tfconfig,
            transformer_layer_spec=self.get_transformer_layer_spec(),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            rotary_base=args.rotary_base,
        )
        keep_fp32_when_cast(model)
        return model


def converters() -> dict[SupportedModel, Any]:
    """Row provider: the entry for verl's MODEL_CONFIG_CONVERTER_REGISTRY."""
    return {SupportedModel.DEEPSEEK_V3: config_of_arguments}


def initializers() -> dict[SupportedModel, Any]:
    """Row provider: the entry for verl's MODEL_INITIALIZER_REGISTRY."""
    return {SupportedModel.DEEPSEEK_V3: MindSpeedModel}
