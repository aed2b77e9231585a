"""Fused attention of torch_npu; its gradient is torch's. Only context parallelism calls the backward function of it.

B batch, S and Skv lengths, N query heads, Nkv key heads (N a multiple), D head width of q and k, Dv of v, T packed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from itertools import pairwise

import torch
from einops import rearrange

from verl_patches.emulation.op_schemas import demand, torch_npu_op, wide

LAYOUTS = {"BSH": "b s (n d)", "SBH": "s b (n d)", "BNSD": "b n s d", "BSND": "b s n d", "TND": "(b s) n d"}
COMPRESSED = 2048  # side of the mask that sparse modes 2, 3 and 4 take, whatever the lengths
_STORED = 8  # softmax statistics are stored eight times


@functools.cache
def _triangle() -> torch.Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool).triu(1)


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call; `check` raises ValueError for those that a device refuses or the reference does not do.

    Sparse modes: 0 the full mask given (set: hidden) and the band of pre and next tokens, or no mask at all; 1 the full
    mask alone; 2 causal from the left upper corner; 3 causal to the right lower corner; 4 a band from there.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    head_num: int
    input_layout: str
    scale: float
    keep_prob: float
    sparse_mode: int
    pre_tockens: int
    next_tockens: int
    atten_mask: torch.Tensor | None
    padding_mask: torch.Tensor | None
    pse: torch.Tensor | None
    prefix: list[int] | None
    actual_seq_qlen: list[int] | None
    actual_seq_kvlen: list[int] | None

    @property
    def layout(self) -> str:
        """One of LAYOUTS; the ops take lower case too."""
        return self.input_layout.upper()

    def check(self) -> None:
        """ValueError that names the argument, what was expected and what was found."""
        names = ", ".join(LAYOUTS)
        demand(self.layout in LAYOUTS, f"unknown input_layout {self.layout!r}, expected one of {names}")
        inputs = self.query, self.key, self.value
        dtypes, dims = {x.dtype for x in inputs}, [x.dim() for x in inputs]
        demand(len(dtypes) == 1, f"query, key and value must be of one dtype, found {sorted(map(str, dtypes))}")
        width = len(self.layout)
        demand(set(dims) == {width}, f"{self.layout} needs tensors of {width} dimensions, found {dims}")
        demand(self.head_num > 0, f"head_num must be more than 0, found {self.head_num}")
        demand(self.keep_prob == 1, f"keep_prob is {self.keep_prob}: dropout is not part of the reference")
        unused = self.padding_mask is None and self.prefix is None and self.pse is None
        demand(unused, "pse, padding_mask and prefix are not part of the reference")
        self._check_mask()
        self._check_ends()

    def _check_mask(self) -> None:
        mode, mask = self.sparse_mode, self.atten_mask
        demand(mode in range(5), f"sparse_mode {mode} is not part of the reference, which has 0 to 4")
        demand(mode == 0 or mask is not None, f"sparse_mode {mode} needs atten_mask")
        demand(mask is None or mask.dtype in (torch.bool, torch.uint8), "atten_mask must be bool or uint8")
        if mode in (2, 3, 4):
            triangle, shape = _triangle(), list(mask.shape)
            fits = mask.shape[-2:] == triangle.shape and mask.numel() == triangle.numel()
            demand(fits, f"sparse_mode {mode} takes a mask of {COMPRESSED} x {COMPRESSED}, found {shape}")
            causal = torch.equal(mask.bool().view_as(triangle), triangle)
            demand(causal, f"sparse_mode {mode} takes the mask that is set above the diagonal")

    def _check_ends(self) -> None:
        ends = self.actual_seq_qlen, self.actual_seq_kvlen
        packed = self.layout == "TND"
        needed = all((one is not None) == packed for one in ends)
        demand(needed, "actual_seq_qlen and actual_seq_kvlen are needed for TND, and for TND only")
        if packed:
            q_ends, kv_ends = map(list, ends)
            totals = [q_ends[-1:], kv_ends[-1:]] == [[len(self.query)], [len(self.key)]]
            rising = q_ends == sorted(q_ends) and kv_ends == sorted(kv_ends)
            demand(
                totals and rising and len(q_ends) == len(kv_ends),
                f"actual_seq_qlen {q_ends} and actual_seq_kvlen {kv_ends} must be cumulative ends, as many of both, "
                f"up to {len(self.query)} and {len(self.key)}",
            )

    def key_heads(self) -> int:
        """Nkv, from the shapes; ValueError where they and head_num do not go together."""
        width, key_width, n = self.query.shape[-1], self.key.shape[-1], self.head_num
        if "N" in self.layout:
            axis = self.layout.index("N")
            found, heads = self.query.shape[axis], self.key.shape[axis]
            demand(width == key_width, f"query and key differ in head width: {width}, {key_width}")
        else:
            fits = width % n == 0 and key_width % (width // n) == 0
            demand(fits, f"query's width {width} or key's {key_width} does not go into {n} heads")
            found, heads = n, key_width // (width // n)
        fits = found == n and found % heads == 0
        demand(fits, f"head_num {n} must be the query's {found} heads, a multiple of the key's {heads}")
        return heads

    def heads_first(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        """A tensor of any layout as [B, N, S, D]; a packed one as [1, N, T, D]."""
        batch = {"b": 1} if self.layout == "TND" else {}
        return rearrange(x, f"{LAYOUTS[self.layout]} -> b n s d", n=heads, **batch)

    def as_laid_out(self, x: torch.Tensor) -> torch.Tensor:
        """[B, N, S, D] in the call's layout."""
        return rearrange(x, f"b n s d -> {LAYOUTS[self.layout]}")

    def wide_heads(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as [B, N, S, D] in fp32 at least: keys of a group of heads are repeated for each."""
        heads, n = self.key_heads(), self.head_num
        k, v = (wide(self.heads_first(x, heads)).repeat_interleave(n // heads, 1) for x in (self.key, self.value))
        return wide(self.heads_first(self.query, n)), k, v

    def parts(self, s: int, s_kv: int) -> Iterator[tuple[slice, slice]]:
        """(queries, keys) that see each other: all, or one packed sequence after the other.

        A length of 0 is fine: Megatron's cumulative lengths begin with 0.
        """
        q_ends, kv_ends = ([s], [s_kv]) if self.layout != "TND" else (self.actual_seq_qlen, self.actual_seq_kvlen)
        for (a, b), (c, d) in zip(pairwise([0, *q_ends]), pairwise([0, *kv_ends]), strict=True):
            yield slice(a, b), slice(c, d)

    def scores(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """[B, N, s, s_kv] before softmax, -inf where hidden."""
        made = q @ k.transpose(-1, -2) * self.scale
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
        band = (ahead > self.next_tockens) | (ahead < -self.pre_tockens)
        if self.sparse_mode == 4:
            return band
        mask = self.atten_mask.bool()
        mask = mask[..., :s, :s_kv] if self.layout == "TND" else mask
        fits = mask.shape[-2:] == (s, s_kv)
        demand(fits, f"sparse_mode {self.sparse_mode} takes a mask of {s} x {s_kv}, found {list(mask.shape)}")
        return mask if self.sparse_mode == 1 else mask | band


@torch_npu_op
def npu_fusion_attention(inner_precise, gen_mask_parallel, sync, **given):
    """softmax(scale * q k^T, masked) v, with seven outputs.

    Those are: attention in the layout of query, softmax maximum and sum (fp32 [B, N, S, 8], packed [T, N, 8]), an empty
    tensor, and three numbers (seed, offset, count of dropout), here 0, 0 and the count. Masks: see Call. A query that
    sees no key gives zero, its maximum is -inf and its sum 0 (a device leaves that undefined).
    """
    call = Call(**given)
    call.check()
    q, k, v = call.wide_heads()
    outs, tops, sums, pairs = [], [], [], 0
    for here, there in call.parts(q.shape[2], k.shape[2]):
        scores = call.scores(q[:, :, here], k[:, :, there])
        nothing = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
        top = torch.cat((scores, nothing), -1).detach().amax(-1, keepdim=True)
        weights = (scores - top.clamp_min(torch.finfo(top.dtype).min)).exp()
        total = weights.sum(-1, keepdim=True)
        outs.append(weights / total.clamp_min(torch.finfo(total.dtype).tiny) @ v[:, :, there])
        tops.append(top)
        sums.append(total.detach())
        pairs += scores.shape[-2] * scores.shape[-1]
    out = call.as_laid_out(torch.cat(outs, 2)).to(call.query.dtype)
    top, total = (torch.cat(parts, 2).expand(-1, -1, -1, _STORED) for parts in (tops, sums))
    if call.layout == "TND":
        top, total = (x.squeeze(0).transpose(0, 1) for x in (top, total))
    count = len(q) * call.head_num * pairs
    return out, top.float().contiguous(), total.float().contiguous(), call.query.new_empty(0), 0, 0, count
