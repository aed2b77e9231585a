"""Implement torch_npu's fused causal attention in plain torch, in the layouts of training; autograd differentiates it.

Letters of shapes: B batch, S and Skv lengths, N query heads, Nkv key heads (N is a multiple of it), D head width of q
and k, Dv of v, T packed tokens. npu_fusion_attention_grad has no reference: DeepSeek-V3's training never calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from itertools import pairwise

import torch
from einops import rearrange

from verl_patches.reference import demand, to_fp32

LAYOUTS = {"SBH": "s b (n d)", "TND": "(b s) n d"}
CAUSAL = 3  # sparse mode: causal to the lower right corner of each sequence
_STATISTIC_COPIES = 8  # the op stores each softmax statistic eight times


@functools.cache
def _causal_mask() -> torch.Tensor:
    """Return the mask that the op expects for all lengths."""
    return torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def _check_arguments(layout, sparse_mode, keep_prob, atten_mask, inputs, ends) -> None:
    """Raise ValueError for arguments that a device refuses or misuses, or that the reference does not support."""
    demand(layout in LAYOUTS, f"input_layout must be {' or '.join(LAYOUTS)}, found {layout!r}")
    fits = sparse_mode == CAUSAL and keep_prob == 1
    demand(fits, f"sparse_mode must be {CAUSAL} and keep_prob 1, found {sparse_mode} and {keep_prob}")
    dtypes, dims = {x.dtype for x in inputs}, [x.dim() for x in inputs]
    demand(len(dtypes) == 1 and set(dims) == {3}, f"q, k and v must have one dtype and 3 dims, found {dtypes}, {dims}")
    fits = atten_mask is not None and atten_mask.dtype in (torch.bool, torch.uint8)
    fits = fits and torch.equal(atten_mask.bool(), _causal_mask())
    demand(fits, f"atten_mask must be 2048 x 2048 and true above the diagonal only, for sparse_mode {sparse_mode}")
    packed = layout == "TND"
    fits = all((one is not None) == packed for one in ends)
    demand(fits, "actual_seq_qlen and actual_seq_kvlen must be given for TND, and be None for SBH")
    if packed:
        q_ends, kv_ends = map(list, ends)
        totals = [q_ends[-1:], kv_ends[-1:]] == [[len(inputs[0])], [len(inputs[1])]]
        rising = q_ends == sorted(q_ends) and kv_ends == sorted(kv_ends) and len(q_ends) == len(kv_ends)
        found = f"actual_seq_qlen {q_ends} and actual_seq_kvlen {kv_ends}"
        demand(totals and rising, f"{found} must increase to {len(inputs[0])} and {len(inputs[1])}")


def _sequence_slices(q: torch.Tensor, k: torch.Tensor, ends) -> Iterator[tuple[slice, slice]]:
    """Yield slices (queries, keys) that attend to each other: all, or one packed sequence after the other.

    A length of 0 is allowed: Megatron's cumulative lengths begin with 0.
    """
    q_ends, kv_ends = ends if ends[0] is not None else ([q.shape[2]], [k.shape[2]])
    for (a, b), (c, d) in zip(pairwise([0, *q_ends]), pairwise([0, *kv_ends]), strict=True):
        yield slice(a, b), slice(c, d)


def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    scale,
    keep_prob,
    sparse_mode,
    atten_mask,
    padding_mask,
    pse,
    prefix,
    actual_seq_qlen,
    actual_seq_kvlen,
):
    """Compute softmax(scale * q k^T, causal) v and return the op's seven outputs.

    They are: attention in the layout of query, softmax maximum and sum (fp32 [B, N, S, 8], packed [T, N, 8]), an empty
    tensor, and three numbers (seed, offset, count of dropout), here 0, 0 and the count. A query without keys gives
    zero, its maximum is -inf and its sum 0 (a device leaves that undefined).
    """
    ends, packed = (actual_seq_qlen, actual_seq_kvlen), input_layout == "TND"
    demand(padding_mask is None and prefix is None and pse is None, "pse, padding_mask and prefix must be None")
    _check_arguments(input_layout, sparse_mode, keep_prob, atten_mask, (query, key, value), ends)
    heads = key.shape[1] if packed else key.shape[2] // (query.shape[2] // head_num)
    fits = heads > 0 and head_num % heads == 0 and (not packed or query.shape[1] == head_num)
    demand(fits, f"head_num {head_num} must be the query's heads, a multiple of the key's {heads}")

    def heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
        sizes = {"n": heads, "b": 1} if packed else {"n": heads}
        made = rearrange(to_fp32(x), f"{LAYOUTS[input_layout]} -> b n s d", **sizes)
        return made.repeat_interleave(head_num // heads, 1)

    q, k, v = heads_first(query, head_num), heads_first(key, heads), heads_first(value, heads)
    outs, tops, sums, pairs = [], [], [], 0
    for here, there in _sequence_slices(q, k, ends):
        scores = q[:, :, here] @ k[:, :, there].transpose(-1, -2) * scale
        s, s_kv = scores.shape[-2:]
        ahead = torch.arange(s_kv) - torch.arange(s).unsqueeze(1) - (s_kv - s)
        scores = scores.masked_fill(ahead > 0, -torch.inf)
        nothing = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
        top = torch.cat((scores, nothing), -1).detach().amax(-1, keepdim=True)
        weights = (scores - top.clamp_min(torch.finfo(top.dtype).min)).exp()
        total = weights.sum(-1, keepdim=True)
        outs.append(weights / total.clamp_min(torch.finfo(total.dtype).tiny) @ v[:, :, there])
        tops.append(top)
        sums.append(total.detach())
        pairs += s * s_kv
    out = rearrange(torch.cat(outs, 2), f"b n s d -> {LAYOUTS[input_layout]}").to(query.dtype)
    top, total = (torch.cat(parts, 2).expand(-1, -1, -1, _STATISTIC_COPIES) for parts in (tops, sums))
    if packed:
        top, total = (x.squeeze(0).transpose(0, 1) for x in (top, total))
    count = len(q) * head_num * pairs
    return out, top.float().contiguous(), total.float().contiguous(), query.new_empty(0), 0, 0, count
