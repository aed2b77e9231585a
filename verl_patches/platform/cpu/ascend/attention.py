"""Fused attention, forward and backward, for torch_npu and for MindSpeed's builder (which calls it v2).

B batch, S and Skv lengths, N query heads, Nkv key heads (N a multiple), D head width of q and k, Dv of v, T packed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch

from verl_patches.platform.cpu.ascend.checked import demand, torch_npu_op, wide

LAYOUTS = ("BSH", "SBH", "BNSD", "BSND", "TND")
COMPRESSED = 2048  # side of the mask that sparse modes 2, 3 and 4 take, whatever the lengths


@functools.cache
def _triangle() -> torch.Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)


@dataclass(frozen=True)
class Call:
    """What forward and backward must agree on; ValueError for what a device refuses or the reference does not do.

    Sparse modes: 0 the full mask given (set: hidden) and the band of pre and next tokens, or no mask at all; 1 the full
    mask alone; 2 causal from the left upper corner; 3 causal to the right lower corner; 4 a band from there.
    """

    op: str
    head_num: int
    layout: str
    scale: float
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    atten_mask: torch.Tensor | None
    pse: torch.Tensor | None
    pse_type: int
    q_ends: list[int] | None
    kv_ends: list[int] | None

    def check(self, query, key, value, keep_prob, padding_mask, prefix) -> Call:
        """Itself, if the call is one that the reference computes as a device does."""
        op = self.op
        demand(
            self.layout in LAYOUTS, op, f"unknown input_layout {self.layout!r}, expected one of {', '.join(LAYOUTS)}"
        )
        dtypes, dims = {x.dtype for x in (query, key, value)}, [x.dim() for x in (query, key, value)]
        demand(len(dtypes) == 1, op, f"query, key and value must be of one dtype, found {sorted(map(str, dtypes))}")
        width = 4 if self.layout in ("BNSD", "BSND") else 3
        demand(set(dims) == {width}, op, f"{self.layout} needs tensors of {width} dimensions, found {dims}")
        demand(self.head_num > 0, op, f"head_num must be more than 0, found {self.head_num}")
        demand(keep_prob == 1, op, f"keep_prob is {keep_prob}: dropout is not part of the reference")
        demand(padding_mask is None and prefix is None, op, "padding_mask and prefix are not part of the reference")
        demand(
            self.pse is None or self.pse_type in (0, 1),
            op,
            f"pse_type {self.pse_type} is not part of the reference, which has 0 and 1",
        )
        self._check_mask()
        self._check_ends(query, key)
        return self

    def _check_mask(self) -> None:
        mode, mask = self.sparse_mode, self.atten_mask
        demand(mode in range(5), self.op, f"sparse_mode {mode} is not part of the reference, which has 0 to 4")
        demand(mode == 0 or mask is not None, self.op, f"sparse_mode {mode} needs atten_mask")
        demand(mask is None or mask.dtype in (torch.bool, torch.uint8), self.op, "atten_mask must be bool or uint8")
        if mode in (2, 3, 4):
            triangle = _triangle()
            demand(
                mask.shape[-2:] == triangle.shape and mask.numel() == triangle.numel(),
                self.op,
                f"sparse_mode {mode} takes a mask of {COMPRESSED} x {COMPRESSED}, found {list(mask.shape)}",
            )
            demand(
                torch.equal(mask.bool().view_as(triangle), triangle),
                self.op,
                f"sparse_mode {mode} takes the mask that is set above the diagonal",
            )

    def _check_ends(self, query, key) -> None:
        packed, given = self.layout == "TND", (self.q_ends is not None, self.kv_ends is not None)
        demand(
            given == (packed, packed),
            self.op,
            "actual_seq_qlen and actual_seq_kvlen are needed for TND, and for TND only",
        )
        if packed:
            q_ends, kv_ends = list(self.q_ends), list(self.kv_ends)
            demand(
                len(q_ends) == len(kv_ends)
                and q_ends == sorted(q_ends)
                and kv_ends == sorted(kv_ends)
                and q_ends[-1:] == [len(query)]
                and kv_ends[-1:] == [len(key)],
                self.op,
                f"actual_seq_qlen {q_ends} and actual_seq_kvlen {kv_ends} must be cumulative ends, as many of both, "
                f"up to {len(query)} and {len(key)}",
            )

    def key_heads(self, query: torch.Tensor, key: torch.Tensor) -> int:
        """Nkv, from the shapes; ValueError where they and head_num do not go together."""
        axis = {"BNSD": 1, "BSND": 2, "TND": 1}.get(self.layout)
        if axis is None:
            width, rest = divmod(query.shape[-1], self.head_num)
            demand(
                rest == 0 and key.shape[-1] % width == 0,
                self.op,
                f"query's width {query.shape[-1]} or key's {key.shape[-1]} does not go into {self.head_num} heads",
            )
            found, heads = self.head_num, key.shape[-1] // width
        else:
            found, heads = query.shape[axis], key.shape[axis]
            demand(
                query.shape[-1] == key.shape[-1],
                self.op,
                f"query and key differ in head width: {query.shape[-1]}, {key.shape[-1]}",
            )
        demand(
            found == self.head_num and found % heads == 0,
            self.op,
            f"head_num {self.head_num} must be the query's {found} heads, a multiple of the key's {heads}",
        )
        return heads

    def heads_first(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """A tensor of any layout as [B, N, S, D]; a packed one as [1, N, T, D]."""
        if self.layout == "BNSD":
            return x
        if self.layout == "TND":
            return x.transpose(0, 1).unsqueeze(0)
        if self.layout == "BSND":
            return x.transpose(1, 2)
        x = x.unflatten(-1, (heads, -1))
        return x.permute(1, 2, 0, 3) if self.layout == "SBH" else x.transpose(1, 2)

    def as_laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, S, D] in the call's layout."""
        if self.layout == "BNSD":
            return x
        if self.layout == "TND":
            return x.squeeze(0).transpose(0, 1)
        if self.layout == "BSND":
            return x.transpose(1, 2)
        return (x.permute(2, 0, 1, 3) if self.layout == "SBH" else x.transpose(1, 2)).flatten(-2)

    def parts(self, s: int, s_kv: int) -> Iterator[tuple[slice, slice]]:
        """(queries, keys) that see each other: all, or one packed sequence after the other.

        A length of 0 is fine: Megatron's cumulative lengths begin with 0.
        """
        if self.layout != "TND":
            yield slice(0, s), slice(0, s_kv)
            return
        for (a, b), (c, d) in zip(pairwise([0, *self.q_ends]), pairwise([0, *self.kv_ends]), strict=True):
            yield slice(a, b), slice(c, d)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """[B, N, s, s_kv] before softmax, -inf where hidden."""
        made = q @ k.transpose(-1, -2)
        if self.pse is None:
            made = made * self.scale
        elif self.pse_type == 1:
            made = (made + wide(self.pse)) * self.scale
        else:
            made = made * self.scale + wide(self.pse)
        hidden = self._hidden(q.shape[-2], k.shape[-2])
        return made if hidden is None else made.masked_fill(hidden, -torch.inf)

    def _hidden(self, s: int, s_kv: int) -> torch.Tensor | None:
        """True where a query may not look, broadcasting to [B, N, s, s_kv]; None: nowhere.

        A query stands at the key of its own number, in modes 3 and 4 counted from the end. Packed sequences all take
        the left upper corner of a full mask.
        """
        if self.atten_mask is None:
            return None
        ahead = torch.arange(s_kv) - torch.arange(s).unsqueeze(1)
        if self.sparse_mode in (3, 4):
            ahead = ahead - (s_kv - s)
        if self.sparse_mode in (2, 3):
            return ahead > 0
        band = (ahead > self.next_tokens) | (ahead < -self.pre_tokens)
        if self.sparse_mode == 4:
            return band
        mask = self.atten_mask.bool()
        mask = mask[..., :s, :s_kv] if self.layout == "TND" else mask
        demand(
            mask.shape[-2:] == (s, s_kv),
            self.op,
            f"sparse_mode {self.sparse_mode} takes a mask of {s} x {s_kv}, found {list(mask.shape)}",
        )
        return mask if self.sparse_mode == 1 else mask | band


_EIGHT = 8  # softmax statistics are stored eight times
_UNLIMITED = 2147483647


@torch_npu_op
def npu_fusion_attention(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    scale=1.0,
    keep_prob=1.0,
    pre_tockens=_UNLIMITED,
    next_tockens=_UNLIMITED,
    inner_precise=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
):
    """softmax(scale * (q k^T + pse), masked) v, with seven outputs.

    Those are: attention in the layout of query, softmax maximum and sum (fp32 [B, N, S, 8], packed [T, N, 8]), an empty
    tensor, and three numbers (seed, offset, count of dropout), here 0, 0 and the count. Masks: see Call.
    """
    call = Call(
        "npu_fusion_attention",
        head_num,
        input_layout.upper(),
        scale,
        sparse_mode,
        pre_tockens,
        next_tockens,
        atten_mask,
        pse,
        1,
        actual_seq_qlen,
        actual_seq_kvlen,
    )
    return attend(call.check(query, key, value, keep_prob, padding_mask, prefix), query, key, value)


@torch_npu_op
def npu_fusion_attention_grad(
    query,
    key,
    value,
    dy,
    head_num,
    input_layout,
    *,
    pse=None,
    padding_mask=None,
    atten_mask=None,
    softmax_max=None,
    softmax_sum=None,
    softmax_in=None,
    attention_in=None,
    scale_value=1.0,
    keep_prob=1.0,
    pre_tockens=_UNLIMITED,
    next_tockens=_UNLIMITED,
    inner_precise=0,
    seed=0,
    offset=0,
    numels=0,
    prefix=None,
    actual_seq_qlen=None,
    actual_seq_kvlen=None,
    sparse_mode=0,
    gen_mask_parallel=True,
    sync=False,
):
    """(dq, dk, dv, dpse) of npu_fusion_attention from its outputs; the statistics given are used, not computed anew.

    So the statistics may be those of a longer softmax of which this is a part, as in ring attention.
    """
    call = Call(
        "npu_fusion_attention_grad",
        head_num,
        input_layout.upper(),
        scale_value,
        sparse_mode,
        pre_tockens,
        next_tockens,
        atten_mask,
        pse,
        1,
        actual_seq_qlen,
        actual_seq_kvlen,
    )
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
    return (
        out,
        top.float().contiguous(),
        total.float().contiguous(),
        query.new_empty(0),
        0,
        0,
        len(q) * call.head_num * pairs,
    )


@torch.no_grad()
def attend_backward(call: Call, query, key, value, dy, softmax_max, softmax_sum, attention_in):
    """(dq, dk, dv, dpse) by the formula of flash attention; dpse is empty without pse."""
    demand(
        all(x is not None for x in (softmax_max, softmax_sum, attention_in)),
        call.op,
        "softmax_max, softmax_sum and attention_in of the forward call are needed",
    )
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
