"""Provide DeepSeek-V3's config converter, model initializer and attention for verl's registries on line a3.

All are built from the arguments that start.py gave Megatron, because MindSpeed-LLM's modules read those and not a
TransformerConfig.

MindSpeed-LLM 2.0.0's own attention refuses packed sequences (dot_product_attention.py,
dot_product_attention_forward_wrapper), reads the lengths of packed ones from a global instead, and takes padding masks
[B, 1, S, S]; verl sends PackedSeqParams, or a mask [B, S]. Shape letters: S sequence, B batch, T packed tokens, N heads
of this rank, D head size.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.identity_op import IdentityOp
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from mindspeed_llm.tasks.models.transformer.mla_dot_product_attention import MlaDotProductAttention
from mindspeed_llm.tasks.models.transformer.multi_head_latent_attention import LinearNoTP
from verl.models.mcore.model_initializer import BaseModelInitializer
from verl.models.mcore.registry import SupportedModel

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import edit_for_training
from verl_patches.model.mindspeed.compat import (
    count_trained_tokens_only,
    keep_all_positions,
    keep_router_buffers_fp32,
    packed_lengths,
)
from verl_patches.model.value_head import add_value_head
from verl_patches.platform.npu import attention


def config_from_arguments(hf_config: Any, dtype: torch.dtype, **overrides: Any):
    """Return the TransformerConfig of the model that the engine was started for.

    Removes fp8 and MTP entries from `hf_config` in place (layout/model_folder.py). Raises ConfigError for another
    dtype; model/checks.py compares the sizes of a value model. `overrides` is always empty: engine start refuses them.
    """
    edit_for_training(hf_config)
    args = get_args()
    if dtype != args.params_dtype:
        raise ConfigError(f"dtype is {dtype}; expected {args.params_dtype}, for which Megatron was started")
    config = core_transformer_config_from_args(args)
    config.pipeline_dtype = config.params_dtype
    return config


class MindSpeedModel(BaseModelInitializer):
    """Build Megatron's GPTModel of MindSpeed-LLM's DeepSeek layers with CausalMlaAttention."""

    def get_transformer_layer_spec(self) -> ModuleSpec:
        """Return a copy of MindSpeed-LLM's DeepSeek spec, whose module reads the arguments when it is imported."""
        from mindspeed_llm.tasks.models.spec.deepseek_spec import layer_spec

        spec = copy.deepcopy(layer_spec)
        attention = spec.submodules.self_attention.submodules
        attention.core_attention = CausalMlaAttention
        if self.hf_config.q_lora_rank is None:
            attention.linear_qkv, attention.q_layernorm = InputAndLatent, IdentityOp
        return spec

    def get_rope_scaling_args(self) -> dict[str, Any]:
        """Return no arguments: MindSpeed-LLM takes yarn from its command line."""
        return {}

    def initialize(self, *args: Any, value: bool = False, **kwargs: Any) -> GPTModel:
        """Return this stage's model, with a value head where `value` is true."""
        model = super().initialize(*args, **kwargs)
        if value:
            add_value_head(model)
        keep_router_buffers_fp32(model)
        count_trained_tokens_only(model)
        if (size := get_args().context_parallel_size) > 1:
            keep_all_positions(model.rotary_pos_emb, size, parallel_state.get_context_parallel_rank())
        return model


def converters() -> dict[SupportedModel, Any]:
    """Return DeepSeek-V3's entry for verl's MODEL_CONFIG_CONVERTER_REGISTRY."""
    return {SupportedModel.DEEPSEEK_V3: config_from_arguments}


def initializers() -> dict[SupportedModel, Any]:
    """Return DeepSeek-V3's entry for verl's MODEL_INITIALIZER_REGISTRY."""
    return {SupportedModel.DEEPSEEK_V3: MindSpeedModel}


class InputAndLatent(LinearNoTP):
    """Project input [S, B, H] to [input, latent] of [S, B, H + latent]: linear_qkv of a model without q_lora_rank.

    linear_qb then projects the input itself to this rank's heads. Upstream puts the whole query into this projection,
    which TP does not split, and reads its [S / tp, B, all heads] as [S, B, heads / tp]: with TP the model is another.
    """

    def __init__(self, input_size: int, output_size: int, config: Any, **kwargs: Any):
        super().__init__(input_size, output_size - input_size, config, **kwargs)

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """Return `input_` and its latent, joined in the last dimension."""
        return torch.cat([input_, super().forward(input_)], dim=-1)


class CausalMlaAttention(MlaDotProductAttention):
    """Compute MindSpeed-LLM's MLA attention, always causal, for packed sequences (PackedSeqParams) too.

    query, key [S, B, N, D] and value [S, B, N, D or less] give [S, B, N * value's D]; with packed_seq_params S is T and
    B is 1, under context parallelism too, where MindSpeed's Ulysses calls it with all tokens of N / cp heads. Padding
    is on the right of each sequence (verl removes it on the left), so that the causal mask is enough and
    `attention_mask` is not read. There is no dropout: the HF config must say 0 (arguments.py).
    """

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None):
        """Return the attention of query, key and value; the class's docstring has the shapes."""
        attend = functools.partial(attention.fused_attention, heads=query.shape[2], scale=self.softmax_scale)
        if packed_seq_params is None:
            return attend(*(x.flatten(2) for x in (query, key, value)))
        ends = packed_lengths(packed_seq_params.cu_seqlens_q).ends
        out = attend(*(x.squeeze(1) for x in (query, key, value)), ends=ends)
        return out.flatten(1).unsqueeze(1)
