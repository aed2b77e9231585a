"""Fused attention in all layouts and sparse modes, forward and backward: against a formula in fp64."""

import functools

import pytest
import torch

from verl_patches.emulation.ascend.packages import torch_npu

B, HEADS, KEY_HEADS, S, S_KV, D, DV, SCALE = 2, 4, 2, 5, 7, 6, 4, 0.3
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
attend = functools.partial(torch_npu.npu_fusion_attention, scale=SCALE)


def draw(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def qkv():
    """q, k, v as [B, N, S, D]."""
    return draw((B, HEADS, S, D), (B, KEY_HEADS, S_KV, D), (B, KEY_HEADS, S_KV, DV))


def formula(q, k, v, hidden=None, pse=0.0):
    """(attention, maximum, sum) [B, N, S, ...] from exponentials."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = SCALE * (torch.einsum("bnsd,bntd->bnst", q, k) + pse)
    hidden = torch.zeros(scores.shape, dtype=torch.bool) if hidden is None else hidden
    weights, top = scores.exp() * ~hidden, scores.masked_fill(hidden, -torch.inf).amax(-1)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bnst,bntd->bnsd", weights / total, v)
    return out, top, total.squeeze(-1) / top.exp()


def check_gradients(inputs, expected, found):
    """Gradients of the op are those of the formula's result `expected`."""
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(out, inputs, grad) for out in (found[0], expected)]
    torch.testing.assert_close(*gradients)


LAYOUTS = {
    "BNSD": lambda x: x,
    "BSND": lambda x: x.transpose(1, 2),
    "BSH": lambda x: x.transpose(1, 2).flatten(2),
    "SBH": lambda x: x.permute(2, 0, 1, 3).flatten(2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    inputs = qkv()
    out, *statistics = formula(*inputs)
    found = attend(*map(LAYOUTS[layout], inputs), HEADS, layout)
    torch.testing.assert_close(found[0], LAYOUTS[layout](out))
    assert len(found) == 7 and found[3].numel() == 0 and found[4:] == (0, 0, B * HEADS * S * S_KV)
    for stat, expected in zip(found[1:3], statistics, strict=True):
        assert not stat.requires_grad
        torch.testing.assert_close(stat, expected.detach().float().unsqueeze(-1).expand(-1, -1, -1, 8))
    assert torch.equal(attend(*map(LAYOUTS[layout], inputs), HEADS, layout.lower())[0], found[0])


def ahead(s, s_kv, offset=0):
    return torch.arange(s_kv) - torch.arange(s).unsqueeze(1) - offset


LEFT, RIGHT = ahead(S, S_KV), ahead(S, S_KV, S_KV - S)
RANDOM = torch.rand(B, 1, S, S_KV, generator=torch.Generator().manual_seed(3)) < 0.3
RANDOM[..., 0] = False  # every query sees something
NONE = torch.zeros(S, S_KV, dtype=torch.bool)
MODES = {
    "0, no mask": ({"pre_tockens": 0, "next_tockens": 0}, None),
    "0, full mask": ({"atten_mask": RANDOM}, RANDOM),
    "0, mask of two dimensions, as numbers": ({"atten_mask": RANDOM[0, 0].byte()}, RANDOM[0, 0]),
    "0, mask and band": ({"atten_mask": NONE, "pre_tockens": 2, "next_tockens": 1}, (LEFT > 1) | (LEFT < -2)),
    "1": ({"sparse_mode": 1, "atten_mask": RANDOM, "pre_tockens": 0, "next_tockens": 0}, RANDOM),
    "2": ({"sparse_mode": 2, "atten_mask": TRIANGLE}, LEFT > 0),
    "3": ({"sparse_mode": 3, "atten_mask": TRIANGLE}, RIGHT > 0),
    "4": ({"sparse_mode": 4, "atten_mask": TRIANGLE, "pre_tockens": 2, "next_tockens": 0}, (RIGHT > 0) | (RIGHT < -2)),
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_sparse_modes_and_gradients(mode):
    more, hidden = MODES[mode]
    inputs = qkv()
    expected = formula(*inputs, hidden)[0]
    found = attend(*inputs, HEADS, "BNSD", **more)
    torch.testing.assert_close(found[0], expected)
    check_gradients(inputs, expected, found)


Q_ENDS, KV_ENDS = [0, 3, 3, 5], [0, 4, 4, 9]  # as Megatron gives them, and with a sequence of length 0


@pytest.mark.parametrize(("mode", "mask"), [(0, None), (2, TRIANGLE), (3, TRIANGLE)])
def test_packed(mode, mask):
    q, k, v = inputs = draw((5, HEADS, D), (9, KEY_HEADS, D), (9, KEY_HEADS, DV))
    more = {"actual_seq_qlen": Q_ENDS, "actual_seq_kvlen": KV_ENDS, "sparse_mode": mode, "atten_mask": mask}
    found = attend(*inputs, HEADS, "TND", **more)
    parts = []
    for (a, b), (c, d) in (((0, 3), (0, 4)), ((3, 5), (4, 9))):
        hidden = ahead(b - a, d - c, d - c - b + a if mode == 3 else 0) > 0
        one = [x[e:f].transpose(0, 1)[None] for x, e, f in ((q, a, b), (k, c, d), (v, c, d))]
        parts.append(formula(*one, hidden if mode else None))
    expected = torch.cat([part[0][0].transpose(0, 1) for part in parts])
    torch.testing.assert_close(found[0], expected)
    assert found[1].shape == found[2].shape == (5, HEADS, 8) and found[6] == HEADS * (3 * 4 + 2 * 5)
    top = torch.cat([part[1][0].T for part in parts])
    torch.testing.assert_close(found[1][..., 0], top.detach().float())
    check_gradients(inputs, expected, found)


def test_packed_sequences_take_the_corner_of_a_full_mask():
    inputs, ends = draw(*[(5, 1, D)] * 3), {"actual_seq_qlen": [2, 5], "actual_seq_kvlen": [2, 5]}
    full = attend(*inputs, 1, "TND", atten_mask=TRIANGLE[:3, :3], **ends)[0]
    torch.testing.assert_close(full, attend(*inputs, 1, "TND", atten_mask=TRIANGLE, sparse_mode=2, **ends)[0])


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    inputs, mask = qkv(), NONE.clone()
    mask[1] = True
    out, top, total = attend(*inputs, HEADS, "BNSD", atten_mask=mask)[:3]
    assert out[:, :, 1].count_nonzero() == 0 and total[:, :, 1].count_nonzero() == 0
    assert bool((top[:, :, 1] == -torch.inf).all())
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(bool(grad.isfinite().all()) for grad in grads) and grads[0][:, :, 1].count_nonzero() == 0


def test_bf16_is_computed_wide_and_rounded_once():
    inputs = [x.detach().bfloat16() for x in qkv()]
    out = attend(*inputs, HEADS, "BNSD")[0]
    exact = formula(*(x.double() for x in inputs))[0]
    assert out.dtype == torch.bfloat16 and (out - exact).abs().max() < exact.abs().max() * 2**-8


Q, Q4, T = torch.zeros(B, S, HEADS * D), torch.zeros(B, HEADS, S, D), torch.zeros(S, HEADS, D)
# words of the error -> query, key, layout, heads, further arguments
REFUSED = {
    "unknown input_layout 'HSB'": (Q, Q, "HSB", 4, {}),
    "needs tensors of 4": (Q, Q, "BNSD", 4, {}),
    "head_num 3 must be": (Q4, Q4, "BNSD", 3, {}),
    "does not go into 5 heads": (Q, Q, "BSH", 5, {}),
    "more than 0": (Q, Q, "BSH", 0, {}),
    "differ in head width": (Q4, Q4[..., :3], "BNSD", 4, {}),
    "of one dtype": (Q, Q.bfloat16(), "BSH", 4, {}),
    "dropout": (Q, Q, "BSH", 4, {"keep_prob": 0.9}),
    "prefix": (Q, Q, "BSH", 4, {"prefix": [1, 1]}),
    "sparse_mode 5": (Q, Q, "BSH", 4, {"sparse_mode": 5}),
    "needs atten_mask": (Q, Q, "BSH", 4, {"sparse_mode": 2}),
    "2048 x 2048": (Q, Q, "BSH", 4, {"sparse_mode": 2, "atten_mask": TRIANGLE[:S, :S]}),
    "set above the diagonal": (Q, Q, "BSH", 4, {"sparse_mode": 3, "atten_mask": ~TRIANGLE}),
    "bool or uint8": (Q, Q, "BSH", 4, {"atten_mask": torch.zeros(S, S)}),
    "a mask of 5 x 5": (Q, Q, "BSH", 4, {"atten_mask": torch.zeros(S, 3).bool()}),
    "needed for TND": (T, T, "TND", 4, {}),
    "for TND only": (Q, Q, "BSH", 4, {"actual_seq_qlen": [S], "actual_seq_kvlen": [S]}),
    "cumulative ends": (T, T, "TND", 4, {"actual_seq_qlen": [3, 2], "actual_seq_kvlen": [3, 2]}),
    "up to 5 and 5": (T, T, "TND", 4, {"actual_seq_qlen": [3], "actual_seq_kvlen": [3]}),
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_refused(words):
    query, key, layout, heads, more = REFUSED[words]
    with pytest.raises(ValueError, match=f"npu_fusion_attention: .*{words}"):
        attend(query, key, query, heads, layout, **more)
