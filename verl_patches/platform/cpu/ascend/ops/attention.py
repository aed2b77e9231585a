"""Fused attention, forward and backward, for torch_npu and for MindSpeed's builder (which calls it v2).

Shape letters as in attention_call.py.
"""

from __future__ import annotations

import torch

from verl_patches.platform.cpu.ascend.ops.attention_call import Call
from verl_patches.platform.cpu.ascend.ops.checked import demand, torch_npu_op, wide

_EIGHT = 8  # softmax statistics are stored eight times
_UNLIMITED = 2147483647


@torch_npu_op
def npu_fusion_attention(query, key, value, head_num, input_layout, pse=None, padding_mask=None, atten_mask=None,
                         scale=1.0, keep_prob=1.0, pre_tockens=_UNLIMITED, next_tockens=_UNLIMITED, inner_precise=0,
                         prefix=None, actual_seq_qlen=None, actual_seq_kvlen=None, sparse_mode=0,
                         gen_mask_parallel=True, sync=False):
    """softmax(scale * (q k^T + pse), masked) v, with seven outputs.

    Those are: attention in the layout of query, softmax maximum and sum (fp32 [B, N, S, 8], packed [T, N, 8]), an empty
    tensor, and three numbers (seed, offset, count of dropout), here 0, 0 and the count. Masks: see Call.
    """
    call = Call("npu_fusion_attention", head_num, input_layout.upper(), scale, sparse_mode, pre_tockens, next_tockens,
                atten_mask, pse, 1, actual_seq_qlen, actual_seq_kvlen)
    return attend(call.check(query, key, value, keep_prob, padding_mask, prefix), query, key, value)


@torch_npu_op
def npu_fusion_attention_grad(query, key, value, dy, head_num, input_layout, *, pse=None, padding_mask=None,
                              atten_mask=None, softmax_max=None, softmax_sum=None, softmax_in=None, attention_in=None,
                              scale_value=1.0, keep_prob=1.0, pre_tockens=_UNLIMITED, next_tockens=_UNLIMITED,
                              inner_precise=0, seed=0, offset=0, numels=0, prefix=None, actual_seq_qlen=None,
                              actual_seq_kvlen=None, sparse_mode=0, gen_mask_parallel=True, sync=False):
    """(dq, dk, dv, dpse) of npu_fusion_attention from its outputs; the statistics given are used, not computed anew.

    So the statistics may be those of a longer softmax of which this is a part, as in ring attention.
    """
    call = Call("npu_fusion_attention_grad", head_num, input_layout.upper(), scale_value, sparse_mode, pre_tockens,
                next_tockens, atten_mask, pse, 1, actual_seq_qlen, actual_seq_kvlen)
    call.check(query, key, value, keep_prob, padding_mask, prefix)
    return attend_backward(call, query, key, value, dy, softmax_max, softmax_sum, attention_in)


def _spread(call: Call, query, key, value):
    """q, k, v as [B, N, S, D] in fp32 at least, and Nkv: keys of a group of heads are repeated for each."""
    heads = call.key_heads(query, key)
    q = wide(call.heads_first(query, call.head_num))
    k, v = (wide(call.heads_first(x, heads)).repeat_interleave(call.head_num // heads, 1) for x in (key, value))
    return q, k, v, heads


def attend(call: Call, query, key, value):
    """The seven outputs. A query that sees no key gives zero, its maximum is -inf and its sum 0 (device: undefined)."""
    q, k, v, _ = _spread(call, query, key, value)
    outs, tops, sums = [], [], []
    for here, there in call.parts(q.shape[2], k.shape[2]):
        scores = call.scores(q[:, :, here], k[:, :, there])
        nothing = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
        top = torch.cat((scores, nothing), -1).detach().amax(-1, keepdim=True)
        weights = (scores - top.clamp_min(torch.finfo(top.dtype).min)).exp()
        total = weights.sum(-1, keepdim=True)
        outs.append(weights / total.clamp_min(torch.finfo(total.dtype).tiny) @ v[:, :, there])
        tops.append(top)
        sums.append(total.detach())
    out = call.as_laid_out(torch.cat(outs, 2)).to(query.dtype)
    top, total = (torch.cat(found, 2).expand(-1, -1, -1, _EIGHT) for found in (tops, sums))
    if call.layout == "TND":
        top, total = (x.squeeze(0).transpose(0, 1) for x in (top, total))
    pairs = sum((b.stop - b.start) * (a.stop - a.start) for a, b in call.parts(q.shape[2], k.shape[2]))
    return (out, top.float().contiguous(), total.float().contiguous(), query.new_empty(0), 0, 0,
            len(q) * call.head_num * pairs)


@torch.no_grad()
def attend_backward(call: Call, query, key, value, dy, softmax_max, softmax_sum, attention_in):
    """(dq, dk, dv, dpse) by the formula of flash attention; dpse is empty without pse."""
    demand(all(x is not None for x in (softmax_max, softmax_sum, attention_in)), call.op,
           "softmax_max, softmax_sum and attention_in of the forward call are needed")
    demand(call.pse is None or call.layout != "TND", call.op, "pse with TND is not part of the reference")
    q, k, v, heads = _spread(call, query, key, value)
    grad, out = (wide(call.heads_first(x, call.head_num)) for x in (dy, attention_in))
    top, total = (x.to(q.dtype) for x in (softmax_max, softmax_sum))
    if call.layout == "TND":
        top, total = (x.transpose(0, 1).unsqueeze(0) for x in (top, total))
    top, total = top.clamp_min(torch.finfo(q.dtype).min), total.clamp_min(torch.finfo(q.dtype).tiny)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_pse = query.new_empty(0)
    for here, there in call.parts(q.shape[2], k.shape[2]):
        scores = call.scores(q[:, :, here], k[:, :, there])
        weights = (scores - top[:, :, here, :1]).exp() / total[:, :, here, :1]
        d_weights = grad[:, :, here] @ v[:, :, there].transpose(-1, -2)
        d_scores = weights * (d_weights - (grad[:, :, here] * out[:, :, here]).sum(-1, keepdim=True))
        dv[:, :, there] = weights.transpose(-1, -2) @ grad[:, :, here]
        dq[:, :, here] = d_scores @ k[:, :, there] * call.scale
        dk[:, :, there] = d_scores.transpose(-1, -2) @ q[:, :, here] * call.scale
        if call.pse is not None:
            factor = call.scale if call.pse_type == 1 else 1.0
            d_pse = (d_scores * factor).sum_to_size(call.pse.shape).to(call.pse.dtype)
    dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
    return (*(call.as_laid_out(x).to(query.dtype).contiguous() for x in (dq, dk, dv)), d_pse)
