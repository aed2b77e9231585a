"""Fused attention v2 and the update of ring attention (mindspeed/ops/csrc/cann/fusion_attention_v2.cpp,
npu_ring_attention_update.cpp)."""

from __future__ import annotations

import torch

from verl_patches.platform.cpu.ascend.ops.attention import attend, attend_backward
from verl_patches.platform.cpu.ascend.ops.attention_call import Call
from verl_patches.platform.cpu.ascend.ops.checked import builder_op, demand, wide


@builder_op("npu_fusion_attention_v2(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? "
            "pse_opt, Tensor? padding_mask_opt, Tensor? atten_mask_opt, float scale, float keep_prob, int pre_tokens, "
            "int next_tokens, int inner_precise, int[]? prefix_opt, int[]? actual_seq_qlen, int[]? actual_seq_kvlen, "
            "int sparse_mode, bool gen_mask_parallel, bool sync, int pse_type, int[]? q_start_idx, int[]? "
            "kv_start_idx) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)")
@torch.no_grad()
def npu_fusion_attention_v2(query, key, value, head_num, input_layout, pse_opt, padding_mask_opt, atten_mask_opt, scale,
                            keep_prob, pre_tokens, next_tokens, inner_precise, prefix_opt, actual_seq_qlen,
                            actual_seq_kvlen, sparse_mode, gen_mask_parallel, sync, pse_type, q_start_idx,
                            kv_start_idx, /):
    """The seven outputs of torch_npu's npu_fusion_attention; pse_type 0 adds pse after scaling, 1 before."""
    call = Call("npu_fusion_attention_v2", head_num, input_layout.upper(), scale, sparse_mode, pre_tokens, next_tokens,
                atten_mask_opt, pse_opt, pse_type, actual_seq_qlen, actual_seq_kvlen)
    return attend(call.check(query, key, value, keep_prob, padding_mask_opt, prefix_opt), query, key, value)


@builder_op("npu_fusion_attention_grad_v2(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str "
            "input_layout, Tensor? pse, Tensor? padding_mask, Tensor? atten_mask, Tensor? softmax_max, Tensor? "
            "softmax_sum, Tensor? softmax_in, Tensor? attention_in, float scale_value, float keep_prob, int "
            "pre_tokens, int next_tokens, int inner_precise, int seed, int offset, int numels, int[]? prefix, int[]? "
            "actual_seq_qlen, int[]? actual_seq_kvlen, int sparse_mode, bool gen_mask_parallel, bool sync, int "
            "pse_type, int[]? q_start_idx, int[]? kv_start_idx) -> (Tensor, Tensor, Tensor, Tensor)")
def npu_fusion_attention_grad_v2(query, key, value, dy, head_num, input_layout, pse, padding_mask, atten_mask,
                                 softmax_max, softmax_sum, softmax_in, attention_in, scale_value, keep_prob, pre_tokens,
                                 next_tokens, inner_precise, seed, offset, numels, prefix, actual_seq_qlen,
                                 actual_seq_kvlen, sparse_mode, gen_mask_parallel, sync, pse_type, q_start_idx,
                                 kv_start_idx, /):
    """(dq, dk, dv, dpse), the last None without pse."""
    call = Call("npu_fusion_attention_grad_v2", head_num, input_layout.upper(), scale_value, sparse_mode, pre_tokens,
                next_tokens, atten_mask, pse, pse_type, actual_seq_qlen, actual_seq_kvlen)
    call.check(query, key, value, keep_prob, padding_mask, prefix)
    *grads, d_pse = attend_backward(call, query, key, value, dy, softmax_max, softmax_sum, attention_in)
    return (*grads, None if pse is None else d_pse)


@builder_op("npu_ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum, Tensor "
            "cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, Tensor? actual_seq_qlen=None, "
            "str? layout='SBH') -> Tensor[]")
@torch.no_grad()
def npu_ring_attention_update(prev_attn_out, prev_softmax_max, prev_softmax_sum, cur_attn_out, cur_softmax_max,
                              cur_softmax_sum, actual_seq_qlen=None, layout="SBH"):
    """[attention, maximum, sum] over the keys of both parts; attention [S, B, H], statistics [B, N, S, 8]."""
    demand(layout in (None, "SBH"), "npu_ring_attention_update", f"layout {layout!r} is not part of the reference")
    top = torch.maximum(prev_softmax_max, cur_softmax_max)
    before, now = (part * (best - top).exp() for part, best in ((prev_softmax_sum, prev_softmax_max),
                                                               (cur_softmax_sum, cur_softmax_max)))
    total = before + now
    heads = top.shape[1]
    weights = (w[..., :1].permute(2, 0, 1, 3) for w in (before / total, now / total))
    parts = (wide(x).unflatten(-1, (heads, -1)) for x in (prev_attn_out, cur_attn_out))
    out = sum(w * x for w, x in zip(weights, parts, strict=True)).flatten(-2)
    return [out.to(prev_attn_out.dtype), top, total]
