"""RoPE of packed sequences as MindSpeed-LLM's MLA hands them over. T packed tokens, N heads, D rotary size."""

from __future__ import annotations

import functools

from verl_patches.model.mindspeed.packed import lengths_of


def rope_of_packed(apply_rotary_pos_emb_thd):
    """Row provider for Megatron's `apply_rotary_pos_emb_thd`: take [T, 1, N, D] for what it is.

    Megatron's own splits T and takes the rest for [N, D]. Each token gets the angle of its place in its own sequence;
    freqs is [>= longest sequence, 1, 1, D].
    """

    @functools.wraps(apply_rotary_pos_emb_thd)
    def apply(t, cu_seqlens, freqs, rotary_interleaved=False):
        if t.dim() != 4:
            return apply_rotary_pos_emb_thd(t, cu_seqlens, freqs, rotary_interleaved)
        from megatron.core.models.common.embeddings.rotary_pos_embedding import apply_rotary_pos_emb_bshd  # MindSpeed's

        return apply_rotary_pos_emb_bshd(t, freqs[lengths_of(cu_seqlens).places], rotary_interleaved)

    return apply
