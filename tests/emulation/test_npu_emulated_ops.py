"""References of vllm-ascend's decode functions against each other and plain torch, empty rows, and the device's memory.

The other functions, each with a fault, in whole engines: test_npu_emulated.py; of MC2: test_npu_emulated_mc2.py.
"""

import torch

from verl_patches.emulation.npu import attention_ops, device, memory_pool
from verl_patches.emulation.npu.npu_module import npu

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


def test_the_driver_says_what_is_on_the_device():
    npu.empty_cache()
    (free, total), allocated = npu.mem_get_info(), npu.memory_allocated()
    with device.OnHost():
        made = torch.zeros(1000, device="cuda")
        derived, host = torch.cat([made[:500] * 2, made[500:]]), torch.zeros(1000)
        copies = [host.copy_(derived), torch.empty_like(made, device="cpu").copy_(made), host * 2]
        assert npu.memory_allocated() - allocated == 8000 and copies
        del derived
        made.untyped_storage().resize_(0)
        assert npu.memory_allocated() == allocated and npu.mem_get_info() == (free - 8000, total)
        npu.empty_cache()
        assert npu.mem_get_info() == (free, total)


def test_memory_of_sleep_mode_is_the_devices_while_it_is_unmapped(monkeypatch):
    handles = []
    monkeypatch.setattr(memory_pool._Pool, "storages", {})
    memory_pool.init_module(handles.append, None)
    with device.OnHost(), memory_pool.use_mem_pool(memory_pool.MemPool()):
        made = torch.zeros(1000, device="cuda").t()
        weights = [made, made.contiguous() + 1]
    (free, _), reserved = npu.mem_get_info(), npu.memory_reserved()
    assert [size for _, size, _, _ in handles] == [4000, 4000]
    for handle in handles:
        memory_pool.python_unmap_and_release(*handle)
    assert npu.mem_get_info()[0] - free == 8000 and npu.memory_reserved() == reserved and weights[1].isnan().all()
    for handle in handles:
        memory_pool.python_create_and_map(*handle)
    assert npu.mem_get_info()[0] == free


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_rows_of_a_graph_that_have_no_keys_are_nan_and_read_no_block():
    (latents, ropes), table, _ = caches()
    latents, ropes = (cache.transpose(1, 2) for cache in (latents, ropes))
    options = {"num_heads": N, "num_key_value_heads": 1, "input_layout": "BNSD", "block_size": SIZE, "key_rope": ropes}
    options |= {"query_rope": rand(3, N, 1, R), "block_table": table, "actual_seq_lengths_kv": [5, 0, 9]}
    found, _ = attention_ops.npu_fused_infer_attention_score(rand(3, N, 1, L), latents, latents, **options)
    assert found.isnan().flatten(1).all(1).tolist() == [False, True, False]


def test_a_part_without_keys_leaves_what_was_before():
    x, out, lse = rand(5, N, L), rand(5, N, L), torch.zeros(N, 5)
    before = {"pre_out": rand(5, N, L), "prev_lse": rand(N, 5).float()}
    call = {"q_nope": x, "q_rope": rand(5, N, R), "k_nope": x, "k_rope": rand(5, N, R), "value": x, "qk_scale": 0.3}
    call |= {"mask": rand(8, 8), "seqlen": torch.stack((int32(2, 3), int32(0, 5))), "head_num": N, "kv_head_num": N}
    call |= {"kernel_type": "kernel_type_high_precision", "mask_type": "no_mask", "input_layout": "type_bsnd"}
    attention_ops.npu_ring_mla(**call, **before, calc_type="calc_type_default", output=out, softmax_lse=lse)
    assert torch.equal(out[:2], before["pre_out"][:2]) and torch.equal(lse[:, :2], before["prev_lse"][:, :2])
    assert not torch.isclose(out[2:], before["pre_out"][2:]).any()
