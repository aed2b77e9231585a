"""Causal attention of packed or padded sequences by Ascend's fused kernel.

MindSpeed-LLM 2.0.0 refuses packed sequences in its attention (dot_product_attention.py,
dot_product_attention_forward_wrapper), reads the lengths of packed ones from a global instead, and takes padding masks
[B, 1, S, S]; verl sends PackedSeqParams, or a mask [B, S]. S sequence, B batch, T packed tokens, N heads of this rank,
D head size.
"""

from __future__ import annotations

import functools

import torch
import torch_npu
from mindspeed_llm.tasks.models.transformer.mla_dot_product_attention import MlaDotProductAttention

_COMPRESSED = 2048  # the kernel's fixed size of a causal mask in sparse modes 2 to 4
_RIGHT_DOWN_CAUSAL = 3


class CausalMlaAttention(MlaDotProductAttention):
    """MindSpeed-LLM's MLA attention, always causal, for PackedSeqParams too.

    query, key, value [S, B, N, D] of equal D (MLA pads them) give [S, B, N * D]; with packed_seq_params S is T and B is
    1. Padding is on the right of each sequence (verl removes it on the left), so that being causal is mask enough and
    `attention_mask` is not looked at.
    """

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None):
        attend = functools.partial(
            torch_npu.npu_fusion_attention,
            head_num=query.shape[2],
            atten_mask=_causal_mask(query.device),
            scale=self.softmax_scale,
            keep_prob=1.0 - self.attention_dropout.p,
            sparse_mode=_RIGHT_DOWN_CAUSAL,
        )
        if packed_seq_params is None:
            return attend(*(x.flatten(2) for x in (query, key, value)), input_layout="SBH")[0]
        ends = packed_seq_params.cu_seqlens_q[1:].tolist()
        packed = (x.squeeze(1) for x in (query, key, value))
        out = attend(*packed, input_layout="TND", actual_seq_qlen=ends, actual_seq_kvlen=ends)[0]
        return out.flatten(1).unsqueeze(1)


@functools.lru_cache(maxsize=1)
def _causal_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(_COMPRESSED, _COMPRESSED, dtype=torch.bool, device=device).triu(1)
