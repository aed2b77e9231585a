"""Causal attention of packed or padded sequences by Ascend's fused kernel.

MindSpeed-LLM 2.0.0 refuses packed sequences in its attention (dot_product_attention.py,
dot_product_attention_forward_wrapper), reads the lengths of packed ones from a global instead, and takes padding masks
[B, 1, S, S]; verl sends PackedSeqParams, or a mask [B, S]. S sequence, B batch, T packed tokens, N heads of this rank,
D head size.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from mindspeed_llm.tasks.models.transformer.mla_dot_product_attention import MlaDotProductAttention

from verl_patches.errors import ConfigError
from verl_patches.model.mindspeed.packed import lengths_of
from verl_patches.platform.npu import attention

_RIGHT_DOWN_CAUSAL = 3  # sparse mode


class CausalMlaAttention(MlaDotProductAttention):
    """MindSpeed-LLM's MLA attention, always causal, for PackedSeqParams too.

    query, key [S, B, N, D] and value [S, B, N, D or less] give [S, B, N * value's D]; with packed_seq_params S is T and
    B is 1. Padding is on the right of each sequence (verl removes it on the left), so that being causal is mask enough
    and `attention_mask` is not looked at. Raises ConfigError for a dropout, and what fused_attention refuses.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.attention_dropout.p:
            raise ConfigError(f"attention dropout is {self.attention_dropout.p}; the attention here has none: set 0")

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None):
        attend = functools.partial(attention.fused_attention, heads=query.shape[2], mask=_causal_mask(query.device),
                                   scale=self.softmax_scale, sparse_mode=_RIGHT_DOWN_CAUSAL)  # fmt: skip
        if packed_seq_params is None:
            return attend(*(x.flatten(2) for x in (query, key, value)), layout="SBH")
        ends = lengths_of(packed_seq_params.cu_seqlens_q).ends
        out = attend(*(x.squeeze(1) for x in (query, key, value)), layout="TND", q_ends=ends, kv_ends=ends)
        return out.flatten(1).unsqueeze(1)


@functools.lru_cache(maxsize=1)
def _causal_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(attention.MASK_SIDE, attention.MASK_SIDE, dtype=torch.bool, device=device).triu(1)
