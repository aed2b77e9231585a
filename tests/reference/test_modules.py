"""Test the operators' references against transformers' modules of DeepSeek-V3, in fp32."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import linear
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as modules
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from tests.conftest import ROOT
from verl_patches.reference import attention, experts, layers, paged_mla

CONFIG = DeepseekV3Config(**json.loads((ROOT / "configs/model/deepseekv3_tiny.json").read_text()))
CONFIG._attn_implementation = "eager"
T, H, BLOCK = 13, CONFIG.hidden_size, 4
TABLE = torch.tensor([[2, 0, 3, 1]], dtype=torch.int32)  # blocks of the cache of one sequence
close = torch.testing.assert_close


def module(kind, *arguments, **options):
    """Return a module of transformers with random parameters."""
    made = kind(*arguments, **options)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return made


def test_norms_are_those_of_deepseek_v3():
    norm, x, y = module(modules.DeepseekV3RMSNorm, H, eps=1e-6), torch.randn(T, H), torch.randn(T, H)
    close(layers.npu_rms_norm(x, norm.weight, 1e-6)[0], norm(x))
    normed, _, total = layers.npu_add_rms_norm(x, y, norm.weight, 1e-6)
    close(normed, norm(x + y))
    close(total, x + y)


def test_swiglu_between_the_projections_is_the_mlp():
    mlp, x = module(modules.DeepseekV3MLP, CONFIG), torch.randn(T, H)
    both = torch.cat((linear(x, mlp.gate_proj.weight), linear(x, mlp.up_proj.weight)), -1)
    close(linear(layers.npu_swiglu(both, -1), mlp.down_proj.weight), mlp(x))


def angles(positions):
    """Return cos and sin [1, positions, R] of yarn."""
    return modules.DeepseekV3RotaryEmbedding(CONFIG)(torch.zeros(1), positions)


def test_rotary_embeddings_are_those_of_transformers_with_yarn():
    cos, sin = angles(torch.arange(T)[None])
    q, k = torch.randn(1, 4, T, CONFIG.qk_rope_head_dim), torch.randn(1, 1, T, CONFIG.qk_rope_head_dim)
    paired = modules.apply_rotary_pos_emb_interleave(q, k, cos, sin)
    for x, expected in zip((q, k), paired, strict=True):
        close(layers.npu_interleave_rope(x, cos[:, None], sin[:, None]), expected)
    halves = modules.apply_rotary_pos_emb(q, k, cos, sin)
    for x, expected in zip((q, k), halves, strict=True):
        close(layers.npu_rotary_mul(x, cos[:, None], sin[:, None], "half"), expected)
    table = torch.cat((cos[0, :, : cos.shape[-1] // 2], sin[0, :, : cos.shape[-1] // 2]), -1)
    query, key = (x[0].transpose(0, 1).flatten(1).contiguous() for x in (q, k))
    layers._npu_rotary_embedding(torch.arange(T), query, key, q.shape[-1], table, True)
    close(query.view(T, 4, -1).transpose(0, 1)[None], halves[0])
    query, key = (x[0].transpose(0, 1).flatten(1).contiguous() for x in (q, k))
    layers._npu_rotary_embedding(torch.arange(T), query, key, q.shape[-1], table, False)
    ordered = query.view(T, 4, -1, 2).transpose(-1, -2).flatten(-2)  # halves
    close(ordered.transpose(0, 1)[None], paired[0])


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mla():
    """Return inputs of the attention's core for T tokens, its output [T, N, Dv] by transformers, and its scale."""
    torch.manual_seed(0)
    layer = module(modules.DeepseekV3Attention, CONFIG, 0)
    layer.o_proj = torch.nn.Identity()
    cos, sin = angles(torch.arange(T)[None])
    x, causal = torch.randn(1, T, H), torch.full((T, T), -torch.inf).triu(1)[None, None]
    with torch.no_grad():
        expected = layer(x, (cos, sin), causal)[0].view(T, layer.num_heads, -1)
        q = layer.q_b_proj(layers.npu_rms_norm(layer.q_a_proj(x[0]), layer.q_a_layernorm.weight, 1e-6)[0])
        q = q.view(T, layer.num_heads, 1, -1)
        kv, up = layer.kv_a_proj_with_mqa(x[0]), layer.kv_b_proj.weight.view(layer.num_heads, -1, CONFIG.kv_lora_rank)
        caches = [torch.full((4, BLOCK, 1, n), torch.nan) for n in (CONFIG.qk_rope_head_dim, CONFIG.kv_lora_rank)]
        places, cos, sin = torch.arange(T), cos[0, :, None, None], sin[0, :, None, None]
        slots = TABLE[0].long()[places // BLOCK] * BLOCK + places % BLOCK
        keys, values, k_rope, latent = paged_mla.npu_kv_rmsnorm_rope_cache(
            kv[:, None, None], layer.kv_a_layernorm.weight, cos, sin, slots, *caches, 1e-6, "PA", True
        )
        q_rope = layers.npu_interleave_rope(q[..., CONFIG.qk_nope_head_dim :], cos, sin)[:, :, 0]
    return SimpleNamespace(
        q_nope=q[:, :, 0, : CONFIG.qk_nope_head_dim], q_rope=q_rope, k_rope=k_rope[:, 0], latent=latent[:, 0], up=up,
        key_cache=keys, latent_cache=values, scale=layer.scaling, expected=expected, heads=layer.num_heads,
    )  # fmt: skip


def unabsorbed(mla):
    """Return query and key [T, N, D] and value [T, N, Dv]."""
    both = torch.einsum("tl,nol->tno", mla.latent[:, 0], mla.up)
    k_nope, value = both.split([CONFIG.qk_nope_head_dim, CONFIG.v_head_dim], -1)
    key = torch.cat((k_nope, mla.k_rope.expand(-1, mla.heads, -1)), -1)
    return torch.cat((mla.q_nope, mla.q_rope), -1), key, value


def length(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def test_attention_of_training_is_that_of_transformers(mla):
    options = {"head_num": mla.heads, "scale": mla.scale, "keep_prob": 1.0, "sparse_mode": 3}
    options |= {"atten_mask": torch.ones(2048, 2048, dtype=torch.bool).triu(1)}
    options |= dict.fromkeys(("padding_mask", "pse", "prefix"))
    q, k, v = unabsorbed(mla)
    twice = [torch.cat((x, x)) for x in (q, k, v)]
    ends = dict.fromkeys(("actual_seq_qlen", "actual_seq_kvlen"), [T, 2 * T])
    packed = attention.npu_fusion_attention(*twice, input_layout="TND", **options, **ends)[0]
    close(packed, torch.cat((mla.expected, mla.expected)))
    ends = dict.fromkeys(ends)
    flat = [x.flatten(1)[:, None] for x in (q, k, v)]
    whole = attention.npu_fusion_attention(*flat, input_layout="SBH", **options, **ends)[0]
    close(whole[:, 0], mla.expected.flatten(1))


def test_attention_of_prompts_is_that_of_transformers(mla):
    q, k, v = unabsorbed(mla)
    out, mask = torch.empty_like(v), torch.ones(T, T).triu(1)
    paged_mla._npu_flash_attention(q, k, v, mask, length(T), mla.scale, mla.heads, mla.heads, out)
    close(out, mla.expected)


def test_the_ring_adds_cached_tokens_to_a_chunks_own_attention(mla):
    (q, k, v), cached, nope = unabsorbed(mla), 8, CONFIG.qk_nope_head_dim
    rows = [torch.empty(cached, 1, n) for n in (CONFIG.kv_lora_rank, CONFIG.qk_rope_head_dim)]
    starts = torch.zeros(1, dtype=torch.int32)
    paged_mla.npu_paged_cache_load(mla.latent_cache, mla.key_cache, TABLE, length(cached), starts, False, *rows)
    for found, expected in zip(rows, (mla.latent, mla.k_rope), strict=True):
        close(found, expected[:cached])
    out, sums = torch.empty_like(v[cached:]), torch.empty(mla.heads, T - cached)
    same = {"head_num": mla.heads, "kv_head_num": mla.heads, "qk_scale": mla.scale, "input_layout": "type_bsnd"}
    same |= {"kernel_type": "kernel_type_high_precision", "mask": torch.ones(512, 512).triu(1), "output": out}
    own = {"pre_out": None, "prev_lse": None, "mask_type": "mask_type_triu", "calc_type": "calc_type_first_ring"}
    earlier = {"pre_out": out, "prev_lse": sums, "mask_type": "no_mask", "calc_type": "calc_type_default"}
    parts = [
        (slice(cached, T), length(T - cached), own),
        (slice(0, cached), length(T - cached, cached)[:, None], earlier),
    ]
    for keys, seqlen, options in parts:
        chunk = [q[cached:, :, :nope], q[cached:, :, nope:], k[keys, :, :nope], k[keys, :, nope:], v[keys]]
        paged_mla.npu_ring_mla(*chunk, seqlen=seqlen, softmax_lse=sums, **options, **same)
    close(out, mla.expected[cached:])


def decode(mla, operator):
    """Return the last token's latents [N, L] by one of the operators of decode."""
    q = torch.einsum("no,nol->nl", mla.q_nope[-1], mla.up[:, : CONFIG.qk_nope_head_dim])[None]
    q_rope, latents, keys, N, scale = mla.q_rope[-1:], mla.latent_cache, mla.key_cache, mla.heads, mla.scale
    if operator == "two caches":
        return paged_mla.npu_multi_head_latent_attention(q, q_rope, latents, keys, TABLE, length(T), N, scale, 1)[0]
    if operator == "one cache":
        out, both = torch.empty_like(q), torch.cat((latents, keys), -1)
        query = torch.cat((q, q_rope), -1)
        paged_mla._npu_paged_attention_mla(query, both, 1, N, scale, TABLE, length(T), q.shape[-1], out)
        return out[0]
    latents, keys = (cache.transpose(1, 2) for cache in (latents, keys))
    return paged_mla.npu_fused_infer_attention_score(
        q.unsqueeze(2), latents, latents, q_rope.unsqueeze(2), keys, [T], TABLE, N, 1, scale, "BNSD", BLOCK
    )[0][0, :, 0]


@pytest.mark.parametrize("operator", ["two caches", "one cache", "in a graph"])
def test_attention_of_decode_is_that_of_transformers(operator, mla):
    found = torch.einsum("nl,nvl->nv", decode(mla, operator), mla.up[:, CONFIG.qk_nope_head_dim :])
    close(found, mla.expected[-1])


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def moe():
    """Return x [T, H], the experts of each token and their weights [T, k], and the sum by transformers [T, H]."""
    torch.manual_seed(0)
    layer, x = module(modules.DeepseekV3MoE, CONFIG), torch.randn(T, H)
    layer.gate.e_score_correction_bias = torch.rand(CONFIG.n_routed_experts) / 10
    with torch.no_grad():
        chosen, weights = layer.gate(x)
        expected = layer.moe(x, chosen, weights)
        up = torch.stack([torch.cat((e.gate_proj.weight, e.up_proj.weight)).t() for e in layer.experts])
        down = torch.stack([e.down_proj.weight.t() for e in layer.experts])
    facts = {"x": x, "chosen": chosen.int(), "weights": weights, "up": up, "down": down, "expected": expected}
    return SimpleNamespace(layer=layer, **facts)


def test_routing_is_that_of_transformers(moe):
    sizes = {"k_group": CONFIG.topk_group, "group_count": CONFIG.n_group, "group_select_mode": 1, "norm_type": 1}
    gate = moe.layer.gate
    weights, chosen, _ = experts.npu_moe_gating_top_k(
        linear(moe.x, gate.weight), CONFIG.num_experts_per_tok, bias=gate.e_score_correction_bias, renorm=0,
        out_flag=False, routed_scaling_factor=CONFIG.routed_scaling_factor, eps=1e-20, **sizes,
    )  # fmt: skip
    every = torch.zeros(T, CONFIG.n_routed_experts)
    close(every.scatter(1, chosen.long(), weights), every.scatter(1, moe.chosen.long(), moe.weights))


def test_rows_permuted_to_experts_and_back_are_the_sum_of_transformers(moe):
    ends = moe.chosen.flatten().long().bincount(minlength=CONFIG.n_routed_experts).cumsum(0)
    rows, places = experts.npu_moe_token_permute(moe.x, moe.chosen, None, False)
    inner = layers.npu_swiglu(experts.grouped_matmul(rows, moe.up, ends, 0, 0), -1)
    (out,) = experts.npu_grouped_matmul([inner], [moe.down], ends, 2, 0, 0)
    close(experts.npu_moe_token_unpermute(out, places, moe.weights, False), moe.expected)


def test_rows_routed_by_the_engine_are_the_sum_of_transformers(moe):
    k, count = moe.chosen.shape[1], CONFIG.n_routed_experts
    numbers = torch.arange(T * k, dtype=torch.int32).view(k, T).t().contiguous()
    rows, places, ordered = experts.npu_moe_init_routing(moe.x, numbers, moe.chosen, T)
    ends = experts.npu_moe_compute_expert_tokens(ordered, count).long()
    (inner,) = experts.npu_grouped_matmul([rows], [moe.up], ends, 2, 0, 0)
    (out,) = experts.npu_grouped_matmul(
        [layers.npu_swiglu(inner, -1)], [moe.down], ends.diff(prepend=ends[:1] * 0), 2, 0, 1
    )
    close(experts.npu_moe_finalize_routing(out, moe.weights, places, moe.chosen, 0), moe.expected)


def test_the_plain_loop_over_experts_is_the_sum_of_transformers(moe):
    def expert(number, row):
        return moe.layer.experts[number](row)

    with torch.no_grad():
        close(experts.sum_over_experts(moe.x, moe.chosen, moe.weights, expert), moe.expected)
        wrong = experts.sum_over_experts(moe.x, moe.chosen.roll(1, 1), moe.weights, expert)
    assert (wrong - moe.expected).abs().max() > 0.1  # the control
