"""Implement MLA on a paged cache in plain torch, for vllm_ascend.attention.mla_v1.

Letters of shapes: T tokens, B sequences, N query heads, L latent width (kv_lora_rank), R rotary width, D head width,
Dv value width. A cache is [blocks, block size, heads, width]; a slot is block * block size + place; a block table
[B, blocks] is int32. Scores and softmax are computed in fp32 and rounded once. Slots below 0 are not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from verl_patches.reference import demand, demand_int32, demand_one_dtype, empty_output, to_fp32
from verl_patches.reference.layers import npu_rms_norm, rotate_interleaved


def attend(q, k, v, scale, hidden=None):
    """Return softmax(scale * q k^T, -inf where hidden) v [Tq, N, Dv] and the log of the sums [N, Tq], both fp32."""
    scores = torch.einsum("qnd,knd->nqk", to_fp32(q), to_fp32(k)) * scale
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    sums = scores.logsumexp(-1)
    return torch.einsum("nqk,knd->qnd", (scores - sums.unsqueeze(-1)).exp(), to_fp32(v)), sums


def sequence_slices(lengths: Sequence[int]) -> Iterator[slice]:
    """Yield the slice of each sequence in a tensor that packs them one after the other."""
    begin = 0
    for length in lengths:
        yield slice(begin, begin + length)
        begin += length


def demand_lengths(lengths: Sequence[int], **rows: torch.Tensor | None) -> None:
    """Raise ValueError unless lengths are at least 0 and each packed tensor has as many rows as they sum to."""
    demand(all(length >= 0 for length in lengths), f"lengths must be at least 0, found {list(lengths)}")
    found = {name: len(x) for name, x in rows.items() if x is not None}
    fits = all(count == sum(lengths) for count in found.values())
    demand(fits, f"lengths {list(lengths)} sum to {sum(lengths)}, found rows {found}")


def demand_sequences(count: int, **given: Sequence | torch.Tensor) -> None:
    """Raise ValueError unless each argument has one entry for each of `count` sequences."""
    found = {name: len(x) for name, x in given.items()}
    demand(all(n == count for n in found.values()), f"expected {count} entries, one a sequence, found {found}")


def read_cache(cache: torch.Tensor, blocks: torch.Tensor, length: int) -> torch.Tensor:
    """Return a sequence's first `length` rows [length, heads, width]; `blocks` [blocks] int32 are its cache blocks."""
    demand_int32(block_table=blocks)
    needed = -(-length // cache.shape[1])
    demand(length >= 0, f"length must be at least 0, found {length}")
    demand(needed <= len(blocks), f"length {length} needs {needed} blocks, found {len(blocks)} in the block table")
    read = blocks[:needed].long()
    fits = bool(((read >= 0) & (read < len(cache))).all())
    demand(fits, f"blocks must be 0 to {len(cache) - 1}, found {read.tolist()}")
    return cache[read].flatten(0, 1)[:length]


def write_cache(cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [T, heads, width] into their slots of the cache, in place."""
    blocks, size = cache.shape[:2]
    demand(len(slots) == len(rows), f"expected {len(rows)} slots, one a row, found {len(slots)}")
    demand(bool((slots < blocks * size).all()), f"slots must be below {blocks * size} ({blocks} blocks of {size})")
    valid = slots >= 0
    cache.view(blocks * size, *cache.shape[2:])[slots[valid].long()] = rows[valid]


# -- cache -------------------------------------------------------------------------------------------------------------


def _npu_reshape_and_cache(key, value, key_cache, value_cache, slot_indices):
    """Write key and value [T, heads, width] into their slots (int32 [T])."""
    demand_int32(slot_indices=slot_indices)
    demand_one_dtype(key=key, value=value, key_cache=key_cache, value_cache=value_cache)
    write_cache(key_cache, slot_indices, key)
    write_cache(value_cache, slot_indices, value)


def npu_kv_rmsnorm_rope_cache(kv, gamma, cos, sin, index, k_cache, ckv_cache, epsilon, cache_mode, is_output_kv):
    """Norm the latent of kv [T, 1, 1, L + R], rotate its rotary key, write both to their slots (index, int64 [T]).

    Returns (k_cache [blocks, size, 1, R], ckv_cache [blocks, size, 1, L], rotary key, latent); the last two are empty
    unless is_output_kv. The reference supports cache_mode "PA" only, not the private NZ format.
    """
    demand(cache_mode == "PA", f"cache_mode must be 'PA', found {cache_mode!r}")
    demand_one_dtype(kv=kv, gamma=gamma, cos=cos, sin=sin, k_cache=k_cache, ckv_cache=ckv_cache)
    demand(index.dtype == torch.int64, f"index must be int64, found {index.dtype}")
    latent = gamma.shape[0]
    normed, _ = npu_rms_norm(kv[..., :latent], gamma, epsilon)
    rotated = rotate_interleaved(kv[..., latent:], cos, sin)
    write_cache(k_cache, index.flatten(), rotated[:, 0])
    write_cache(ckv_cache, index.flatten(), normed[:, 0])
    if is_output_kv:
        return k_cache, ckv_cache, rotated, normed
    return k_cache, ckv_cache, empty_output(kv), empty_output(kv)


def npu_paged_cache_load(key_cache, value_cache, block_table, context_lens, seq_starts, cumsum, key, value):
    """Copy rows [start, start + length) of each sequence out of the caches into key and value, packed.

    block_table [B, blocks], context_lens [B] and seq_starts [B] are int32.
    """
    demand(not cumsum, "cumsum must be False: the reference does not support cumulative context_lens")
    demand_int32(block_table=block_table, context_lens=context_lens, seq_starts=seq_starts)
    demand_one_dtype(key_cache=key_cache, value_cache=value_cache, key=key, value=value)
    lengths = context_lens.tolist()
    starts = [0] * len(lengths) if seq_starts is None else seq_starts.tolist()
    demand_sequences(len(block_table), context_lens=lengths, seq_starts=starts)
    demand(all(start >= 0 for start in starts), f"seq_starts must be at least 0, found {starts}")
    demand_lengths(lengths, key=key, value=value)
    for blocks, start, length, here in zip(block_table, starts, lengths, sequence_slices(lengths), strict=True):
        for out, cache in ((key, key_cache), (value, value_cache)):
            out[here] = read_cache(cache, blocks, start + length)[start:]
    return key, value


# -- prefill -----------------------------------------------------------------------------------------------------------


def _npu_flash_attention(query, key, value, mask, seq_len, scale_value, num_heads, num_kv_heads, out):
    """Write the attention of packed sequences [T, N, D] into out.

    seq_len [B] is int32 on the host; entries of mask [S, S] that are not 0 hide a key.
    """
    demand_int32(seq_len=seq_len)
    demand_one_dtype(query=query, key=key, value=value, mask=mask, out=out)
    lengths = seq_len.tolist()
    demand_lengths(lengths, query=query, key=key, value=value, out=out)
    longest, sides = max(lengths, default=0), list(mask.shape)
    demand(len(sides) == 2 and min(sides) >= longest, f"mask must be at least {longest} x {longest}, found {sides}")
    heads = [query.shape[1], key.shape[1]]
    fits = heads == [num_heads, num_kv_heads] and num_heads == num_kv_heads
    demand(fits, f"query and key must have {num_heads} = {num_kv_heads} heads, found {heads}")
    for length, here in zip(lengths, sequence_slices(lengths), strict=True):
        hidden = mask[:length, :length] != 0
        out[here] = attend(query[here], key[here], value[here], scale_value, hidden)[0].view(out[here].shape)


def npu_ring_mla(
    q_nope,
    q_rope,
    k_nope,
    k_rope,
    value,
    mask,
    seqlen,
    head_num,
    kv_head_num,
    pre_out,
    prev_lse,
    qk_scale,
    kernel_type,
    mask_type,
    input_layout,
    calc_type,
    output,
    softmax_lse,
):
    """Attend to one chunk of the keys; write output [T, N, Dv] and softmax_lse (fp32 [N, T]).

    seqlen is int32 on the host, [B] or [2, B] (queries, keys). calc_type_first_ring starts with this chunk;
    calc_type_default merges it with pre_out and prev_lse. mask_type_triu is causal, from the upper left corner: mask
    [S, S] or [B, S, S] must be 0 on and below its diagonal and not 0 above. With no_mask, mask is not read.
    """
    fits = calc_type in ("calc_type_first_ring", "calc_type_default")
    demand(fits, f"calc_type must be calc_type_first_ring or calc_type_default, found {calc_type!r}")
    fits = mask_type in ("mask_type_triu", "no_mask")
    demand(fits, f"mask_type must be mask_type_triu or no_mask, found {mask_type!r}")
    demand(input_layout == "type_bsnd", f"input_layout must be type_bsnd (packed), found {input_layout!r}")
    heads = q_nope.shape[1]
    fits = head_num == kv_head_num == heads
    demand(fits, f"head_num and kv_head_num must be {heads} as in q_nope, found {head_num} and {kv_head_num}")
    fits = kernel_type == "kernel_type_high_precision"
    demand(fits, f"kernel_type must be kernel_type_high_precision (fp32 softmax), found {kernel_type!r}")
    demand_int32(seqlen=seqlen)
    queries = {"q_nope": q_nope, "q_rope": q_rope, "output": output, "pre_out": pre_out}
    keys = {"k_nope": k_nope, "k_rope": k_rope, "value": value}
    demand_one_dtype(mask=mask, **queries, **keys)
    adds = calc_type == "calc_type_default"
    before = [pre_out is not None, prev_lse is not None]
    fits = before == [adds, adds]
    demand(fits, f"pre_out and prev_lse must be given for calc_type_default only, found {before} for {calc_type}")
    lse = [x.dtype for x in (softmax_lse, prev_lse) if x is not None]
    demand(set(lse) <= {torch.float32, to_fp32(q_nope).dtype}, f"softmax_lse and prev_lse must be float32, found {lse}")
    lengths = seqlen.tolist()
    q_lens, kv_lens = (lengths, lengths) if seqlen.dim() == 1 else lengths
    demand_lengths(q_lens, **queries)
    demand_lengths(kv_lens, **keys)
    causal = mask_type == "mask_type_triu"
    if causal:
        upper = torch.ones(mask.shape[-2:], dtype=torch.bool).triu(1)
        fits = mask.shape[-1] == mask.shape[-2] and bool(((mask != 0) == upper).all())
        demand(fits, f"mask {list(mask.shape)} must be square, 0 on and below the diagonal, and not 0 above")
    for here, there, queried, length in zip(
        sequence_slices(q_lens), sequence_slices(kv_lens), q_lens, kv_lens, strict=True
    ):
        if length == 0:
            demand(adds or queried == 0, f"calc_type_first_ring needs keys, found none for {queried} queries")
            if adds:
                output[here], softmax_lse[:, here] = pre_out[here], prev_lse[:, here]
            continue
        q = torch.cat((q_nope[here], q_rope[here]), -1)
        k = torch.cat((k_nope[there], k_rope[there]), -1)
        hidden = torch.ones(len(q), length, dtype=torch.bool).triu(1) if causal else None
        out, sums = attend(q, k, value[there], qk_scale, hidden)
        if adds:
            both = torch.logaddexp(prev_lse[:, here], sums)
            old, new = ((part - both).exp().T.unsqueeze(-1) for part in (prev_lse[:, here], sums))
            out, sums = to_fp32(pre_out[here]) * old + out * new, both
        output[here], softmax_lse[:, here] = out.to(output.dtype), sums
    return output, softmax_lse


# -- decode: absorbed projections, one query token a sequence ---------------------------------------------------------


def decode_token(query, keys, latent_width, scale):
    """Attend with one query [N, L + R] to keys [S, 1, L + R], whose first L columns are the values.

    Returns [N, L] in fp32, NaN without keys.
    """
    if len(keys) == 0:
        return to_fp32(query).new_full((len(query), latent_width), torch.nan)
    keys = keys.expand(-1, len(query), -1)
    return attend(query.unsqueeze(0), keys, keys[..., :latent_width], scale)[0][0]


def _npu_paged_attention_mla(
    query, key_cache, num_kv_heads, num_heads, scale_value, block_table, context_lens, mla_vheadsize, out
):
    """Decode one token a sequence into out [B, N, L]; context_lens is on the host.

    query is [B, N, L + R], key_cache [blocks, size, 1, L + R].
    """
    found = query.shape[1], num_kv_heads
    demand(found == (num_heads, 1), f"(query heads, key heads) must be {num_heads, 1}, found {found}")
    demand_one_dtype(query=query, key_cache=key_cache, out=out)
    demand_int32(block_table=block_table, context_lens=context_lens)
    demand_sequences(len(query), block_table=block_table, context_lens=context_lens, out=out)
    for at, length in enumerate(context_lens.tolist()):
        out[at] = decode_token(query[at], read_cache(key_cache, block_table[at], length), mla_vheadsize, scale_value)


def npu_multi_head_latent_attention(
    q_nope, q_rope, ctkv, k_rope, block_tables, context_lens, q_headnum, qk_scale, kv_headnum
):
    """Decode one token a sequence from two caches: q_nope [B, N, L] and q_rope [B, N, R] give [B, N, L]."""
    demand_one_dtype(q_nope=q_nope, q_rope=q_rope, ctkv=ctkv, k_rope=k_rope)
    demand_int32(context_lens=context_lens if isinstance(context_lens, torch.Tensor) else None)
    demand_sequences(len(q_nope), q_rope=q_rope, block_tables=block_tables, context_lens=context_lens)
    found = q_nope.shape[1], kv_headnum
    demand(found == (q_headnum, 1), f"(query heads, key heads) must be {q_headnum, 1}, found {found}")
    out = torch.empty_like(q_nope)
    for at, length in enumerate(map(int, context_lens)):
        keys = torch.cat([read_cache(cache, block_tables[at], length) for cache in (ctkv, k_rope)], -1)
        out[at] = decode_token(torch.cat((q_nope[at], q_rope[at]), -1), keys, q_nope.shape[-1], qk_scale)
    return out


def npu_fused_infer_attention_score(
    query,
    key,
    value,
    query_rope,
    key_rope,
    actual_seq_lengths_kv,
    block_table,
    num_heads,
    num_key_value_heads,
    scale,
    input_layout,
    block_size,
):
    """Decode one token a sequence in a graph; caches are [blocks, 1, block_size, width].

    query [B, N, 1, L] and query_rope [B, N, 1, R] give ([B, N, 1, L], empty). A row whose length is 0 pads the batch
    to the graph's size: it gives NaN here (a device leaves that undefined). The reference supports layout BNSD without
    a mask only, and one cache of latents only: `value` must be the memory of `key`.
    """
    demand(input_layout == "BNSD", f"input_layout must be 'BNSD', found {input_layout!r}")
    demand_one_dtype(query=query, key=key, value=value, query_rope=query_rope, key_rope=key_rope)
    layout = [(x.data_ptr(), x.shape, x.stride()) for x in (key, value)]
    demand(layout[0] == layout[1], "value must be the same memory as key: both are the cache of latents")
    fits = num_key_value_heads == 1 and query.shape[1:3] == (num_heads, 1)
    found = f"{list(query.shape)} and {num_key_value_heads}"
    demand(fits, f"expected query [B, {num_heads}, 1, L] and 1 key head, found {found}")
    demand(key.shape[2] == block_size, f"block_size must be {key.shape[2]} as in the cache, found {block_size}")
    rows = {"block_table": block_table, "actual_seq_lengths_kv": actual_seq_lengths_kv, "query_rope": query_rope}
    demand_sequences(len(query), **rows)
    out = torch.empty_like(query)
    for at, length in enumerate(actual_seq_lengths_kv):
        keys = [read_cache(cache.transpose(1, 2), block_table[at], length) for cache in (key, key_rope)]
        one = torch.cat((query[at, :, 0], query_rope[at, :, 0]), -1)
        out[at, :, 0] = decode_token(one, torch.cat(keys, -1), query.shape[-1], scale)
    return out, empty_output(query, torch.float32)
