"""Fused attention in the layouts of training, causal, forward and backward: against a formula in fp64."""

import functools

import torch

from verl_patches.emulation.ascend.packages import torch_npu

B, HEADS, KEY_HEADS, S, S_KV, D, DV, SCALE = 2, 4, 2, 5, 7, 6, 4, 0.3
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
attend = functools.partial(torch_npu.npu_fusion_attention, scale=SCALE, atten_mask=TRIANGLE, sparse_mode=3)


def draw(*shapes):
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def qkv(s=S):
    """q, k, v as [B, N, S, D]."""
    return draw((B, HEADS, s, D), (B, KEY_HEADS, S_KV, D), (B, KEY_HEADS, S_KV, DV))


def sbh(x):
    """[B, N, S, D] -> [S, B, N * D]."""
    return x.permute(2, 0, 1, 3).flatten(2)


def formula(q, k, v, corner=1):
    """(attention, maximum, sum) [B, N, S, ...] from exponentials; causal to the right lower corner; 0: left upper."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = SCALE * torch.einsum("bnsd,bntd->bnst", q, k)
    s, s_kv = scores.shape[-2:]
    hidden = torch.arange(s_kv) > torch.arange(s).unsqueeze(1) + corner * (s_kv - s)
    weights, top = scores.exp() * ~hidden, scores.masked_fill(hidden, -torch.inf).amax(-1)
    total = weights.sum(-1, keepdim=True)
    out = torch.einsum("bnst,bntd->bnsd", weights / total, v)
    return out, top, total.squeeze(-1) / top.exp()


def check_gradients(inputs, expected, found):
    """Gradients of the op are those of the formula's result `expected`."""
    grad = torch.randn_like(expected)
    gradients = [torch.autograd.grad(out, inputs, grad) for out in (found[0], expected)]
    torch.testing.assert_close(*gradients)


def test_values_statistics_and_gradients():
    inputs = qkv()
    out, *statistics = formula(*inputs)
    found = attend(*map(sbh, inputs), HEADS, "SBH")
    torch.testing.assert_close(found[0], sbh(out))
    assert len(found) == 7 and found[3].numel() == 0 and found[4:] == (0, 0, B * HEADS * S * S_KV)
    for stat, expected in zip(found[1:3], statistics, strict=True):
        assert not stat.requires_grad
        torch.testing.assert_close(stat, expected.detach().float().unsqueeze(-1).expand(-1, -1, -1, 8))
    check_gradients(inputs, sbh(out), found)
    assert not torch.allclose(sbh(formula(*inputs, corner=0)[0]), found[0])  # the control


Q_ENDS, KV_ENDS = [0, 3, 3, 5], [0, 4, 4, 9]  # as Megatron gives them, and with a sequence of length 0


def test_packed():
    q, k, v = inputs = draw((5, HEADS, D), (9, KEY_HEADS, D), (9, KEY_HEADS, DV))
    found = attend(*inputs, HEADS, "TND", actual_seq_qlen=Q_ENDS, actual_seq_kvlen=KV_ENDS)
    parts = []
    for (a, b), (c, d) in (((0, 3), (0, 4)), ((3, 5), (4, 9))):
        parts.append(formula(*(x[e:f].transpose(0, 1)[None] for x, e, f in ((q, a, b), (k, c, d), (v, c, d)))))
    expected = torch.cat([part[0][0].transpose(0, 1) for part in parts])
    torch.testing.assert_close(found[0], expected)
    assert found[1].shape == found[2].shape == (5, HEADS, 8)
    top = torch.cat([part[1][0].T for part in parts])
    torch.testing.assert_close(found[1][..., 0], top.detach().float())
    check_gradients(inputs, expected, found)


def test_a_query_that_sees_nothing_gives_zero_and_no_gradient():
    """More queries than keys, causal to the right lower corner: the first two see no key."""
    inputs = qkv(S_KV + 2)
    out, top, total = attend(*map(sbh, inputs), HEADS, "SBH")[:3]
    assert out[:2].count_nonzero() == 0 and total[:, :, :2].count_nonzero() == 0 and out[2:].count_nonzero() > 0
    assert bool((top[:, :, :2] == -torch.inf).all())
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert all(bool(grad.isfinite().all()) for grad in grads) and grads[0][:, :, :2].count_nonzero() == 0


def test_bf16_is_computed_wide_and_rounded_once():
    inputs = [x.detach().bfloat16() for x in qkv()]
    out = attend(*map(sbh, inputs), HEADS, "SBH")[0]
    exact = sbh(formula(*(x.double() for x in inputs))[0])
    assert out.dtype == torch.bfloat16 and (out - exact).abs().max() < exact.abs().max() * 2**-8
