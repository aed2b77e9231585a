"""Lengths of packed sequences as attention and RoPE need them, worked out once a forward. T packed tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

_KEPT = "verl_patches_lengths"


class Lengths(NamedTuple):
    """`ends`: where each sequence ends, on the host; `places` [T] int64: of each token in its own sequence."""

    ends: list[int]
    places: torch.Tensor


def lengths_of(cu_seqlens: torch.Tensor) -> Lengths:
    """What `cu_seqlens` (PackedSeqParams, from 0 to T) says; kept on that tensor.

    verl makes one such tensor a forward, which every layer gets, recomputed ones too: the host waits for the device
    once, not in every layer.
    """
    found = getattr(cu_seqlens, _KEPT, None)
    if found is None:
        ends = cu_seqlens[1:].tolist()
        tokens = torch.arange(ends[-1], device=cu_seqlens.device)
        starts = torch.repeat_interleave(cu_seqlens[:-1], cu_seqlens.diff(), output_size=ends[-1])
        found = Lengths(ends, tokens - starts)
        setattr(cu_seqlens, _KEPT, found)
    return found
