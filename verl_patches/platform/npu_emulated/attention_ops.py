"""MLA of vllm-ascend on a paged cache: references of the functions that attention/mla_v1.py and ops/rotary call.

T tokens, B sequences, N query heads, L latent width (kv_lora_rank), R rotary width, D head width, Dv value width. A
cache is [blocks, block size, heads, width]; a slot is block * block size + place; a block table [B, blocks] is int32.
Scores and softmax are computed in fp32 and rounded once. Slots below 0 are not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from verl_patches.platform.cpu.ascend.ops import npu_rms_norm, rotate
from verl_patches.platform.npu.op_schemas import atb_op, demand, torch_npu_op, wide
from verl_patches.platform.npu_emulated.graph import no_values, with_shapes


def attend(q, k, v, scale, hidden=None):
    """(softmax(scale * q k^T, -inf where hidden) v [Tq, N, Dv] and log of the sums [N, Tq], both fp32)."""
    scores = torch.einsum("qnd,knd->nqk", wide(q), wide(k)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    sums = scores.logsumexp(-1)
    return torch.einsum("nqk,knd->qnd", (scores - sums.unsqueeze(-1)).exp(), wide(v)), sums


def pieces(lengths: Sequence[int]) -> Iterator[slice]:
    """Places of sequences that are packed one after the other."""
    begin = 0
    for length in lengths:
        yield slice(begin, begin + length)
        begin += length


def paged(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """The first `length` rows [length, heads, width] of the sequence whose blocks are in `blocks` [blocks]."""
    size = cache.shape[1]
    return cache[blocks[: -(-length // size)].long()].flatten(0, 1)[:length]


def write(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Put rows [T, heads, width] into their slots, in place."""
    blocks, size = cache.shape[:2]
    demand(len(slots) == len(rows), f"{len(slots)} slots for {len(rows)} rows: as many are expected")
    demand(bool((slots < blocks * size).all()), f"a slot is beyond the cache of {blocks} blocks of {size}")
    kept = slots >= 0
    cache.view(blocks * size, *cache.shape[2:])[slots[kept].long()] = rows[kept].to(cache.dtype)


# -- rotary embedding and cache ----------------------------------------------------------------------------------------


@atb_op
def _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style):
    """Rotate query [T, N * head_size] and key in place; cos_sin_cache [positions, R] is cosines beside sines.

    is_neox_style: halves of a head are rotated, else neighbours. Here a head is as wide as the cache.
    """
    demand(cos_sin_cache.shape[-1] == head_size, f"head_size {head_size}, cos_sin_cache {list(cos_sin_cache.shape)}")
    cos, sin = cos_sin_cache[positions.long().flatten()].chunk(2, -1)
    for x in (query, key):
        heads = x.view(1, len(x), -1, head_size)
        both = (torch.cat((part, part), -1) if is_neox_style else part.repeat_interleave(2, -1) for part in (cos, sin))
        cosines, sines = (part[None, :, None] for part in both)
        x.copy_(rotate(heads, cosines, sines, interleaved=not is_neox_style).view(x.shape))


def interleaved(x, cos, sin):
    """x [B, N, S, R] whose neighbours are pairs: first brought to halves, then rotated."""
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin, interleaved=False)


@torch_npu_op
def npu_interleave_rope(x, cos, sin):
    """Rotary embedding of DeepSeek's layout, x [B, N, S, R]; cos and sin [B, 1, 1 or S, R]. The result is in halves."""
    return interleaved(x, cos, sin)


@atb_op
def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    """Write key and value [T, heads, width] into their slots (int32 [T])."""
    demand(slot_indices.dtype == torch.int32, f"slot_indices must be int32, found {slot_indices.dtype}")
    write(key_cache, slot_indices, key)
    write(value_cache, slot_indices, value)


def _cache_shapes(kv, gamma, k_cache, ckv_cache, is_output_kv, **given):
    if not is_output_kv:
        return k_cache, ckv_cache, no_values(kv), no_values(kv)
    latent = gamma.shape[0]
    return k_cache, ckv_cache, torch.empty_like(kv[..., latent:]), torch.empty_like(kv[..., :latent])


@torch_npu_op
@with_shapes(_cache_shapes)
def npu_kv_rmsnorm_rope_cache(
    kv, gamma, cos, sin, index, k_cache, ckv_cache, epsilon, cache_mode, is_output_kv, **quantised
):
    """Norm the latent of kv [T, 1, 1, L + R], rotate its rotary key, write both to their slots (index, int64 [T]).

    Gives (k_cache [blocks, size, 1, R], ckv_cache [blocks, size, 1, L], rotary key, latent); the last two are empty
    unless is_output_kv. Of cache_mode only "PA" is part of the reference, not the private NZ format.
    """
    demand(cache_mode == "PA", f"cache_mode is {cache_mode!r}, expected 'PA'")
    found = ", ".join(name for name, value in quantised.items() if value is not None)
    demand(not found, f"quantised caches are not part of the reference; found {found}")
    demand(index.dtype == torch.int64, f"index must be int64, found {index.dtype}")
    latent = gamma.shape[0]
    normed, _ = npu_rms_norm(kv[..., :latent], gamma, epsilon)
    rotated = interleaved(kv[..., latent:], cos, sin)
    write(k_cache, index.flatten(), rotated[:, 0])
    write(ckv_cache, index.flatten(), normed[:, 0])
    if is_output_kv:
        return k_cache, ckv_cache, rotated, normed
    return k_cache, ckv_cache, no_values(kv), no_values(kv)


@atb_op
def npu_paged_cache_load(key_cache, value_cache, block_table, context_lens, seq_starts, cumsum, key, value):
    """Copy rows [start, start + length) of each sequence out of the caches into key and value, packed."""
    demand(not cumsum, "cumulative context_lens are not part of the reference")
    lengths = context_lens.tolist()
    starts = [0] * len(lengths) if seq_starts is None else seq_starts.tolist()
    for blocks, start, length, here in zip(block_table, starts, lengths, pieces(lengths), strict=True):
        for out, cache in ((key, key_cache), (value, value_cache)):
            out[here] = paged(cache, blocks, start + length)[start:]
    return key, value


# -- prefill -----------------------------------------------------------------------------------------------------------


@atb_op
def _npu_flash_attention(query, key, value, mask, seq_len, scale_value, num_heads, num_kv_heads, out):
    """Attention of packed sequences [T, N, D] into out; seq_len [B] int32 on the host; mask [S, S]: not 0 is hidden."""
    lengths = seq_len.tolist()
    demand(sum(lengths) == len(query) == len(key), f"seq_len {lengths} for {len(query)} queries and {len(key)} keys")
    heads = [query.shape[1], key.shape[1]]
    demand(heads == [num_heads, num_kv_heads] and num_heads == num_kv_heads, f"heads of query and key are {heads}")
    for length, here in zip(lengths, pieces(lengths), strict=True):
        hidden = mask[:length, :length] != 0
        out[here] = attend(query[here], key[here], value[here], scale_value, hidden)[0].view(out[here].shape)


@atb_op
def npu_ring_mla(
    q_nope,
    q_rope,
    k_nope,
    k_rope,
    value,
    seqlen,
    head_num,
    kv_head_num,
    pre_out,
    prev_lse,
    qk_scale,
    mask_type,
    input_layout,
    calc_type,
    output,
    softmax_lse,
    **unused,
):
    """One part of attention over keys in parts: into output [T, N, Dv] and softmax_lse (fp32 [N, T]).

    seqlen int32 on the host, [B] or [2, B] (queries, keys). calc_type_first_ring begins; calc_type_default adds the
    part to pre_out with prev_lse. mask_type_triu is causal, from the left upper corner.
    """
    demand(calc_type in ("calc_type_first_ring", "calc_type_default"), f"unknown calc_type {calc_type!r}")
    demand(mask_type in ("mask_type_triu", "no_mask"), f"unknown mask_type {mask_type!r}")
    demand(input_layout == "type_bsnd", f"input_layout is {input_layout!r}, expected type_bsnd (packed)")
    demand(head_num == kv_head_num == q_nope.shape[1], f"{head_num} and {kv_head_num} heads, q_nope has another number")
    q_lens, kv_lens = (seqlen.tolist(),) * 2 if seqlen.dim() == 1 else seqlen.tolist()
    parts = zip(pieces(q_lens), pieces(kv_lens), kv_lens, strict=True)
    for here, there, length in parts:
        if length == 0:
            continue
        q = torch.cat((q_nope[here], q_rope[here]), -1)
        k = torch.cat((k_nope[there], k_rope[there]), -1)
        hidden = torch.ones(len(q), length, dtype=torch.bool).triu(1) if mask_type == "mask_type_triu" else None
        out, sums = attend(q, k, value[there], qk_scale, hidden)
        if calc_type == "calc_type_default":
            before, both = prev_lse[:, here], torch.logaddexp(prev_lse[:, here], sums)
            old, new = ((part - both).exp().T.unsqueeze(-1) for part in (before, sums))
            out, sums = wide(pre_out[here]) * old + out * new, both
        output[here], softmax_lse[:, here] = out.to(output.dtype), sums
    return output, softmax_lse


# -- decode: absorbed projections, one query token a sequence ---------------------------------------------------------


def decode(query, keys, latent_width, scale):
    """One query [N, L + R] over keys [S, 1, L + R], whose first L are the values: [N, L] in fp32."""
    keys = keys.expand(-1, len(query), -1)
    return attend(query.unsqueeze(0), keys, keys[..., :latent_width], scale)[0][0]


@atb_op
def _npu_paged_attention_mla(
    query, key_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, mla_vheadsize, out
):
    """Decode into out [B, N, L]; query [B, N, L + R], key_cache [blocks, size, 1, L + R]; context_lens on the host."""
    demand(num_kv_heads == 1 and query.shape[1] == num_heads, f"{num_heads} heads and 1 key head: {num_kv_heads} found")
    for at, length in enumerate(context_lens.tolist()):
        out[at] = decode(query[at], paged(key_cache, block_table[at], length), mla_vheadsize, scale_value)


@atb_op
def npu_multi_head_latent_attention(
    q_nope, q_rope, ctkv, k_rope, block_tables, context_lens, q_headnum, qk_scale, kv_headnum, **refused
):
    """The same from two caches: q_nope [B, N, L], q_rope [B, N, R] give [B, N, L]."""
    found = ", ".join(name for name, value in refused.items() if value is not None)
    demand(not found, f"masks, other layouts and quantised caches are not part of the reference; found {found}")
    demand(kv_headnum == 1 and q_nope.shape[1] == q_headnum, f"{q_headnum} heads and 1 key head: {kv_headnum} found")
    out = torch.empty_like(q_nope)
    for at, length in enumerate(map(int, context_lens)):
        keys = torch.cat([paged(cache, block_tables[at], length) for cache in (ctkv, k_rope)], -1)
        out[at] = decode(torch.cat((q_nope[at], q_rope[at]), -1), keys, q_nope.shape[-1], qk_scale)
    return out


def _decode_shapes(query, **given):
    return torch.empty_like(query), no_values(query, torch.float32)


@torch_npu_op
@with_shapes(_decode_shapes)
def npu_fused_infer_attention_score(
    query,
    key,
    value,
    query_rope,
    key_rope,
    atten_mask,
    actual_seq_lengths,
    actual_seq_lengths_kv,
    block_table,
    num_heads,
    num_key_value_heads,
    scale,
    input_layout,
    block_size,
    sparse_mode,
    **unused,
):
    """Decode of a graph: query [B, N, 1, L], query_rope [B, N, 1, R]; caches [blocks, 1, block_size, width].

    Gives ([B, N, 1, L], empty). A row whose length is 0 fills the graph's batch size up: it gives 0 here (a device
    leaves that undefined). Only layout BNSD without a mask is part of the reference.
    """
    demand(input_layout == "BNSD" and atten_mask is None and sparse_mode == 0, f"layout {input_layout!r} or a mask")
    demand(num_key_value_heads == 1 and query.shape[1:3] == (num_heads, 1), f"query {list(query.shape)}")
    demand(key.shape[2] == block_size, f"block_size is {block_size}, the cache's {key.shape[2]}")
    rows = [len(query), len(actual_seq_lengths_kv), len(block_table)]
    demand(len(set(rows)) == 1, f"queries, lengths and rows of the block table must be as many, found {rows}")
    out = torch.zeros_like(query)
    for at, length in enumerate(actual_seq_lengths_kv):
        if length:
            keys = [paged(cache.transpose(1, 2), block_table[at], length) for cache in (key, key_rope)]
            one = torch.cat((query[at, :, 0], query_rope[at, :, 0]), -1)
            out[at, :, 0] = decode(one, torch.cat(keys, -1), query.shape[-1], scale)
    return out, no_values(query, torch.float32)
