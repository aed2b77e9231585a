"""Replace `flash_attn` and `flash_attn.bert_padding` where they are not installed; NPUs and CPUs have no build of them.

verl imports the padding functions by name, also in workers that never call them. These are our own, in plain torch
operations, so gradients are torch's. B: sequences, S: their padded length, T: tokens without padding.
"""

from __future__ import annotations

import torch
from einops import rearrange

__all__ = ["index_first_axis", "pad_input", "rearrange", "unpad_input"]


def index_first_axis(input: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows of `input` [N, ...] at `indices` [M], as [M, ...]; gradients of a repeated row are summed."""
    return input.index_select(0, indices)


def unpad_input(
    hidden_states: torch.Tensor, attention_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Pack [B, S, ...] without padding; `attention_mask` [B, S] is nonzero at tokens.

    Returns the tokens [T, ...], their places in the flattened batch (int64 [T]), cumulative lengths (int32 [B + 1]) and
    the longest length. flash_attn 2.7 and later return one more output, which verl drops.
    """
    lengths = attention_mask.bool().sum(-1, dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    indices = attention_mask.flatten().nonzero().flatten()
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, int(lengths.max())


def pad_input(hidden_states: torch.Tensor, indices: torch.Tensor, batch: int, seqlen: int) -> torch.Tensor:
    """Return a batch [batch, seqlen, ...] with the rows [T, ...] at `indices` and zeros elsewhere."""
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
