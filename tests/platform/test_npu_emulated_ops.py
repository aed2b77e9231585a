"""References of the functions that vllm-ascend calls: against each other and against plain torch, in fp64."""

import pytest
import torch

from verl_patches.platform.npu_emulated import attention_ops, expert_ops, memory_pool
from verl_patches.platform.npu_emulated.npu_module import npu

N, L, R, SIZE = 2, 8, 4, 4  # query heads, latent width, rotary width, block size
LENGTHS = [5, 3, 9]


def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def caches():
    """Two caches, the block table of three sequences whose blocks lie apart, and rows [S, 1, width] of each."""
    table = torch.tensor([[7, 2, 0], [5, 0, 0], [1, 6, 3]], dtype=torch.int32)
    stores = [torch.full((8, SIZE, 1, width), torch.nan, dtype=torch.float64) for width in (L, R)]
    rows = [[rand(length, 1, width) for width in (L, R)] for length in LENGTHS]
    for blocks, (latent, rope) in zip(table, rows, strict=True):
        at = torch.arange(len(latent))
        slots = (blocks[at // SIZE] * SIZE + at % SIZE).to(torch.int32)
        attention_ops._npu_reshape_and_cache(latent, rope, *stores, slots)
    return stores, table, rows


def test_decode_ops_agree_with_plain_attention():
    (latents, ropes), table, rows = caches()
    q_nope, q_rope, lengths = rand(3, N, L), rand(3, N, R), torch.tensor(LENGTHS, dtype=torch.int32)
    expected = []
    for q, (latent, rope) in zip(torch.cat((q_nope, q_rope), -1), rows, strict=True):
        keys = torch.cat((latent, rope), -1).squeeze(1)
        expected.append((0.3 * q @ keys.T).softmax(-1) @ latent.squeeze(1))
    expected = torch.stack(expected)
    call = (q_nope, q_rope, latents, ropes, table, lengths, N, 0.3, 1)
    torch.testing.assert_close(attention_ops.npu_multi_head_latent_attention(*call), expected)
    out = torch.empty_like(expected)
    joint = torch.cat((latents, ropes), -1)
    attention_ops._npu_paged_attention_mla(torch.cat((q_nope, q_rope), -1), joint, 1, N, 0.3, table, lengths, L, out)
    torch.testing.assert_close(out, expected)
    latents, ropes = (cache.transpose(1, 2) for cache in (latents, ropes))
    options = {"num_heads": N, "num_key_value_heads": 1, "input_layout": "BNSD", "scale": 0.3, "block_size": SIZE}
    options |= {"block_table": table, "actual_seq_lengths_kv": LENGTHS, "key_rope": ropes}
    queries = {"query_rope": q_rope.unsqueeze(2)}
    found, _ = attention_ops.npu_fused_infer_attention_score(
        q_nope.unsqueeze(2), latents, latents, **queries, **options
    )
    torch.testing.assert_close(found.squeeze(2), expected)
    other = table[[1, 0, 2]]  # the control: another sequence's blocks
    assert not torch.equal(attention_ops.npu_multi_head_latent_attention(*call[:4], other, *call[5:]), expected)


def test_attention_in_parts_is_attention_at_once():
    nope, rope, value = rand(5, N, L), rand(5, N, R), rand(5, N, L)
    k_nope, k_rope, v = rand(9, N, L), rand(9, N, R), rand(9, N, L)
    mask, seqlen = torch.ones(512, 512), torch.tensor([5], dtype=torch.int32)
    out, lse = torch.empty(5, N, L, dtype=torch.float64), torch.empty(N, 5, dtype=torch.float64)
    options = {"head_num": N, "kv_head_num": N, "qk_scale": 0.3, "input_layout": "type_bsnd", "mask": mask}
    options |= {"kernel_type": "kernel_type_high_precision", "output": out, "softmax_lse": lse}
    first = {"calc_type": "calc_type_first_ring", "mask_type": "mask_type_triu", "seqlen": seqlen}
    attention_ops.npu_ring_mla(
        q_nope=nope, q_rope=rope, k_nope=nope, k_rope=rope, value=value, pre_out=None, prev_lse=None, **first, **options
    )
    both = torch.tensor([[5], [9]], dtype=torch.int32)
    then = {"calc_type": "calc_type_default", "mask_type": "no_mask", "seqlen": both, "pre_out": out, "prev_lse": lse}
    attention_ops.npu_ring_mla(q_nope=nope, q_rope=rope, k_nope=k_nope, k_rope=k_rope, value=v, **then, **options)
    q, k = torch.cat((nope, rope), -1), torch.cat((torch.cat((k_nope, nope)), torch.cat((k_rope, rope))), -1)
    hidden = torch.cat((torch.zeros(5, 9), torch.ones(5, 5).triu(1)), 1).bool()
    scores = (0.3 * torch.einsum("qnd,knd->nqk", q, k)).masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(out, torch.einsum("nqk,knd->qnd", scores.softmax(-1), torch.cat((v, value))))


def test_routing_and_back_is_the_sum_of_the_experts():
    x, k, experts, weight = rand(6, 4), 2, 5, rand(5, 3, 4)
    ids = torch.stack([torch.randperm(experts)[:k] for _ in range(6)]).to(torch.int32)
    scales, numbers = rand(6, k), torch.arange(6 * k, dtype=torch.int32).view(k, 6).T.contiguous()
    rows, places, ordered = expert_ops.npu_moe_init_routing(x, row_idx=numbers, expert_idx=ids, active_num=6)
    ends = expert_ops.npu_moe_compute_expert_tokens(ordered, experts).long()
    options = {"group_list": ends, "group_type": 0, "group_list_type": 0, "split_item": 2}
    (made,) = expert_ops.npu_grouped_matmul(x=[rows], weight=[weight.transpose(1, 2)], **options)
    back = (scales, places, ids)
    found = expert_ops.npu_moe_finalize_routing(made, None, None, None, *back)
    chosen = torch.einsum("tkoi,ti->tko", weight[ids.long()], x)
    torch.testing.assert_close(found, (chosen * scales.unsqueeze(-1)).sum(1))
    (short,) = expert_ops.npu_grouped_matmul(
        x=[rows], weight=[weight.transpose(1, 2)], **options | {"group_list": ends - ends[0]}
    )
    assert short[-int(ends[0]) :].isnan().all() or int(ends[0]) == 0


def test_wrong_calls_are_refused():
    stores, table, _ = caches()
    with pytest.raises(ValueError, match="slot_indices must be int32"):
        attention_ops._npu_reshape_and_cache(rand(1, 1, L), rand(1, 1, R), *stores, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 slots for 1 rows"):
        attention_ops._npu_reshape_and_cache(rand(1, 1, L), rand(1, 1, R), *stores, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(TypeError, match="_npu_reshape_and_cache"):
        attention_ops._npu_reshape_and_cache(rand(1, 1, L), *stores, slots=table)
    with pytest.raises(RuntimeError, match="not mapped"):
        memory_pool.python_unmap_and_release(0, 8, 1, 1)
    with pytest.raises(AttributeError, match="stand-in for torch_npu.npu"):
        npu.magic()
