"""Fused attention in all layouts and sparse modes: against a formula in fp64, by gradcheck, and its own backward."""

import functools

import pytest
import torch
from torch.autograd import gradcheck

from verl_patches.platform.cpu.ascend import mindspeed_ops as v2
from verl_patches.platform.cpu.ascend.packages import torch_npu

B, HEADS, KEY_HEADS, S, S_KV, D, DV, SCALE = 2, 4, 2, 5, 7, 6, 4, 0.3
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
attend = functools.partial(torch_npu.npu_fusion_attention, scale=SCALE)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def qkv(s=S, s_kv=S_KV):
    """q, k, v as [B, N, S, D]."""
    shapes = ((B, HEADS, s, D), (B, KEY_HEADS, s_kv, D), (B, KEY_HEADS, s_kv, DV))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def formula(q, k, v, hidden=None, pse=0.0):
    """(attention, maximum, sum) [B, N, S, ...] from exponentials."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = SCALE * (torch.einsum("bnsd,bntd->bnst", q, k) + pse)
    weights = scores.exp() if hidden is None else scores.exp() * ~hidden
    top = scores.masked_fill(hidden, -torch.inf).amax(-1) if hidden is not None else scores.amax(-1)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bnst,bntd->bnsd", weights / total, v)
    return out, top, total.squeeze(-1) / top.exp()


LAYOUTS = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    q, k, v = qkv()
    out, top, total = formula(q, k, v)
    found = attend(*map(LAYOUTS[layout], (q, k, v)), HEADS, layout)
    torch.testing.assert_close(found[0], LAYOUTS[layout](out))
    assert len(found) == 7 and found[3].numel() == 0 and found[4:] == (0, 0, B * HEADS * S * S_KV)
    for stat, expected in ((found[1], top), (found[2], total)):
        assert stat.shape == (B, HEADS, S, 8) and stat.dtype == torch.float32 and not stat.requires_grad
        torch.testing.assert_close(stat, expected.detach().float().unsqueeze(-1).expand(-1, -1, -1, 8))
    assert torch.equal(attend(*map(LAYOUTS[layout], (q, k, v)), HEADS, layout.lower())[0], found[0])


def places(offset=0):
    return torch.arange(S_KV) - torch.arange(S).unsqueeze(1) - offset


RANDOM = torch.rand(B, 1, S, S_KV, generator=torch.Generator().manual_seed(3)) < 0.3
RANDOM[..., 0] = False  # every query sees something
MODES = {
    "0, no mask": (dict(sparse_mode=0, pre_tockens=0, next_tockens=0), None),
    "0, full mask": (dict(sparse_mode=0, atten_mask=RANDOM), RANDOM),
    "0, mask of two dimensions, as numbers": (dict(atten_mask=RANDOM[0, 0].byte()), RANDOM[0, 0]),
    "0, mask and band": (dict(atten_mask=torch.zeros(S, S_KV).bool(), pre_tockens=2, next_tockens=1),
                         (places() > 1) | (places() < -2)),
    "1": (dict(sparse_mode=1, atten_mask=RANDOM, pre_tockens=0, next_tockens=0), RANDOM),
    "2": (dict(sparse_mode=2, atten_mask=COMPRESSED), places() > 0),
    "3": (dict(sparse_mode=3, atten_mask=COMPRESSED), places(S_KV - S) > 0),
    "4": (dict(sparse_mode=4, atten_mask=COMPRESSED, pre_tockens=2, next_tockens=0),
          (places(S_KV - S) > 0) | (places(S_KV - S) < -2)),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_sparse_modes_and_gradients(mode):
    more, hidden = MODES[mode]
    inputs = qkv()
    expected = formula(*inputs, hidden)[0]
    found = attend(*inputs, HEADS, "BNSD", **more)
    torch.testing.assert_close(found[0], expected)
    grad = torch.randn_like(expected)
    of_formula = torch.autograd.grad(expected, inputs, grad)
    torch.testing.assert_close(torch.autograd.grad(found[0], inputs, grad), of_formula)
    backward = torch_npu.npu_fusion_attention_grad(
        *inputs,
        grad,
        HEADS,
        "BNSD",
        softmax_max=found[1],
        softmax_sum=found[2],
        attention_in=found[0],
        scale_value=SCALE,
        **more,
    )
    torch.testing.assert_close(backward[:3], of_formula, rtol=1e-5, atol=1e-6)  # statistics are fp32


def test_modes_differ():
    inputs = qkv()
    outs = {mode: attend(*inputs, HEADS, "BNSD", **more)[0] for mode, (more, _) in MODES.items()}
    same = [(a, b) for a in outs for b in outs if a < b and torch.allclose(outs[a], outs[b])]
    assert same == [("0, full mask", "1")]


def test_gradcheck():
    inputs = qkv(3, 3)
    assert gradcheck(lambda *x: attend(*x, HEADS, "BNSD", atten_mask=COMPRESSED, sparse_mode=2)[0], inputs)


Q_ENDS, KV_ENDS = [0, 3, 3, 5], [0, 4, 4, 9]  # as Megatron gives them, and with a sequence of nothing


@pytest.mark.parametrize(("mode", "mask"), [(0, None), (2, COMPRESSED), (3, COMPRESSED)])
def test_packed(mode, mask):
    q, k, v = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((5, HEADS, D), (9, KEY_HEADS, D), (9, KEY_HEADS, DV))
    )
    found = attend(
        q, k, v, HEADS, "TND", actual_seq_qlen=Q_ENDS, actual_seq_kvlen=KV_ENDS, sparse_mode=mode, atten_mask=mask
    )
    parts = []
    for (a, b), (c, d) in (((0, 3), (0, 4)), ((3, 5), (4, 9))):
        ahead = torch.arange(d - c) - torch.arange(b - a).unsqueeze(1) - (d - c - b + a if mode == 3 else 0)
        one = [x[e:f].transpose(0, 1)[None] for x, e, f in ((q, a, b), (k, c, d), (v, c, d))]
        parts.append(formula(*one, ahead > 0 if mode else None))
    expected = torch.cat([part[0][0].transpose(0, 1) for part in parts])
    torch.testing.assert_close(found[0], expected)
    assert found[1].shape == found[2].shape == (5, HEADS, 8) and found[6] == HEADS * (3 * 4 + 2 * 5)
    top = torch.cat([part[1][0].T for part in parts])
    torch.testing.assert_close(found[1][..., 0], top.detach().float())
    grad = torch.randn_like(expected)
    of_formula = torch.autograd.grad(expected, (q, k, v), grad)
    torch.testing.assert_close(torch.autograd.grad(found[0], (q, k, v), grad), of_formula)
    backward = torch_npu.npu_fusion_attention_grad(
        q,
        k,
        v,
        grad,
        HEADS,
        "TND",
        softmax_max=found[1],
        softmax_sum=found[2],
        attention_in=found[0],
        scale_value=SCALE,
        actual_seq_qlen=Q_ENDS,
        actual_seq_kvlen=KV_ENDS,
        sparse_mode=mode,
        atten_mask=mask,
    )
    torch.testing.assert_close(backward[:3], of_formula, rtol=1e-5, atol=1e-6)


def test_packed_sequences_take_the_corner_of_a_full_mask():
    q, k, v = (torch.randn(5, 1, D, dtype=torch.float64) for _ in range(3))
    ends = [2, 5]
    mask = torch.ones(3, 3, dtype=torch.bool).triu(1)
    full = attend(q, k, v, 1, "TND", atten_mask=mask, actual_seq_qlen=ends, actual_seq_kvlen=ends)[0]
    causal = attend(
        q, k, v, 1, "TND", atten_mask=COMPRESSED, sparse_mode=2, actual_seq_qlen=ends, actual_seq_kvlen=ends
    )[0]
    torch.testing.assert_close(full, causal)


@pytest.mark.parametrize("pse_type", [0, 1])
def test_pse_is_added_before_or_after_scaling(pse_type):
    q, k, v = qkv()
    pse = torch.randn(B, HEADS, S, S_KV, dtype=torch.float64, requires_grad=True)
    expected = formula(q, k, v, pse=pse if pse_type == 1 else pse / SCALE)[0]
    more = [None, None, SCALE, 1.0, 2**31 - 1, 2**31 - 1, 0, None, None, None, 0, True, False, pse_type, None, None]
    found = v2.npu_fusion_attention_v2(q, k, v, HEADS, "BNSD", pse, *more)
    torch.testing.assert_close(found[0], expected)
    grad = torch.randn_like(expected)
    backward = v2.npu_fusion_attention_grad_v2(
        q,
        k,
        v,
        grad,
        HEADS,
        "BNSD",
        pse,
        None,
        None,
        found[1],
        found[2],
        found[3],
        found[0],
        SCALE,
        1.0,
        2**31 - 1,
        2**31 - 1,
        0,
        0,
        0,
        0,
        None,
        None,
        None,
        0,
        True,
        False,
        pse_type,
        None,
        None,
    )
    torch.testing.assert_close(backward, torch.autograd.grad(expected, (q, k, v, pse), grad), rtol=1e-5, atol=1e-6)


def test_two_halves_of_the_keys_join_to_the_whole():
    q, k, v = (x.detach() for x in qkv())
    lay = LAYOUTS["SBH"]
    parts = [
        attend(lay(q), lay(k[:, :, keys]), lay(v[:, :, keys]), HEADS, "SBH") for keys in (slice(0, 3), slice(3, None))
    ]
    (a, a_top, a_sum), (b, b_top, b_sum) = (part[:3] for part in parts)
    joined = v2.npu_ring_attention_update(a, a_top, a_sum, b, b_top, b_sum)
    whole = attend(lay(q), lay(k), lay(v), HEADS, "SBH")
    torch.testing.assert_close(joined, list(whole[:3]), rtol=1e-5, atol=1e-6)
    # and a part's backward takes the statistics of the whole
    grad = torch.randn_like(whole[0])
    dk = [
        torch_npu.npu_fusion_attention_grad(
            lay(q),
            lay(k[:, :, keys]),
            lay(v[:, :, keys]),
            grad,
            HEADS,
            "SBH",
            softmax_max=whole[1],
            softmax_sum=whole[2],
            attention_in=whole[0],
            scale_value=SCALE,
        )[1]
        for keys in (slice(0, 3), slice(3, None))
    ]
    whole_dk = torch_npu.npu_fusion_attention_grad(
        lay(q),
        lay(k),
        lay(v),
        grad,
        HEADS,
        "SBH",
        softmax_max=whole[1],
        softmax_sum=whole[2],
        attention_in=whole[0],
        scale_value=SCALE,
    )[1]
    torch.testing.assert_close(torch.cat(dk), whole_dk)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    q, k, v = qkv()
    mask = torch.zeros(S, S_KV, dtype=torch.bool)
    mask[1] = True
    out, top, total = attend(q, k, v, HEADS, "BNSD", atten_mask=mask)[:3]
    grad = torch.ones_like(out)
    assert out[:, :, 1].count_nonzero() == 0 and total[:, :, 1].count_nonzero() == 0
    assert bool((top[:, :, 1] == -torch.inf).all())
    grads = torch.autograd.grad(out, (q, k, v), grad)
    assert all(bool(grad.isfinite().all()) for grad in grads) and grads[0][:, :, 1].count_nonzero() == 0
    backward = torch_npu.npu_fusion_attention_grad(
        q,
        k,
        v,
        grad,
        HEADS,
        "BNSD",
        softmax_max=top,
        softmax_sum=total,
        attention_in=out,
        scale_value=SCALE,
        atten_mask=mask,
    )
    torch.testing.assert_close(backward[:3], grads, rtol=1e-5, atol=1e-6)


def test_bf16_is_computed_wide_and_rounded_once():
    q, k, v = (x.detach().bfloat16() for x in qkv())
    out = attend(q, k, v, HEADS, "BNSD")[0]
    exact = formula(*(x.double() for x in (q, k, v)))[0]
    assert out.dtype == torch.bfloat16 and (out - exact).abs().max() < exact.abs().max() * 2**-8


Q = torch.zeros(B, S, HEADS * D)
Q4 = torch.zeros(B, HEADS, S, D)
T = torch.zeros(S, HEADS, D)
REFUSED = {
    "unknown layout": (lambda: attend(Q, Q, Q, HEADS, "HSB"), "unknown input_layout 'HSB'"),
    "three dimensions": (lambda: attend(Q, Q, Q, HEADS, "BNSD"), "needs tensors of 4"),
    "head_num of BNSD": (lambda: attend(Q4, Q4, Q4, 3, "BNSD"), "head_num 3 must be"),
    "head_num of BSH": (lambda: attend(Q, Q, Q, 5, "BSH"), "does not go into 5 heads"),
    "no head": (lambda: attend(Q, Q, Q, 0, "BSH"), "more than 0"),
    "query and key of other widths": (lambda: attend(Q4, Q4[..., :3], Q4, HEADS, "BNSD"), "differ in head width"),
    "mixed dtypes": (lambda: attend(Q, Q.bfloat16(), Q, HEADS, "BSH"), "of one dtype"),
    "dropout": (lambda: attend(Q, Q, Q, HEADS, "BSH", keep_prob=0.9), "dropout"),
    "prefix": (lambda: attend(Q, Q, Q, HEADS, "BSH", prefix=[1, 1]), "prefix"),
    "mode 5": (lambda: attend(Q, Q, Q, HEADS, "BSH", sparse_mode=5), "sparse_mode 5"),
    "causal without its mask": (lambda: attend(Q, Q, Q, HEADS, "BSH", sparse_mode=2), "needs atten_mask"),
    "causal with a mask of its own size": (
        lambda: attend(Q, Q, Q, HEADS, "BSH", sparse_mode=2, atten_mask=COMPRESSED[:S, :S]), "2048 x 2048"),
    "causal with the mask turned round": (
        lambda: attend(Q, Q, Q, HEADS, "BSH", sparse_mode=3, atten_mask=~COMPRESSED), "set above the diagonal"),
    "mask of floats": (lambda: attend(Q, Q, Q, HEADS, "BSH", atten_mask=torch.zeros(S, S)), "bool or uint8"),
    "mask of another size": (
        lambda: attend(Q, Q, Q, HEADS, "BSH", atten_mask=torch.zeros(S, 3).bool()), "a mask of 5 x 5"),
    "packed without lengths": (lambda: attend(T, T, T, HEADS, "TND"), "needed for TND"),
    "lengths without packing": (
        lambda: attend(Q, Q, Q, HEADS, "BSH", actual_seq_qlen=[S], actual_seq_kvlen=[S]), "for TND only"),
    "lengths in place of ends": (
        lambda: attend(T, T, T, HEADS, "TND", actual_seq_qlen=[3, 2], actual_seq_kvlen=[3, 2]), "cumulative ends"),
    "ends short of the tokens": (
        lambda: attend(T, T, T, HEADS, "TND", actual_seq_qlen=[3], actual_seq_kvlen=[3]), "up to 5 and 5"),
    "backward without statistics": (
        lambda: torch_npu.npu_fusion_attention_grad(Q, Q, Q, Q, HEADS, "BSH"), "softmax_max"),
    "ring update of packed sequences": (
        lambda: v2.npu_ring_attention_update(Q, Q, Q, Q, Q, Q, None, "TND"), "layout 'TND'"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
