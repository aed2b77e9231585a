"""The other reference ops: against formulas and loops in fp64 written here, torch's own optimizer, and by gradcheck."""

import pytest
import torch
from torch.autograd import gradcheck

from verl_patches.emulation.ascend import mindspeed_ops
from verl_patches.emulation.ascend.packages import torch_npu


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def leaf(*shape):
    return randn(*shape).requires_grad_()


# -- elementwise ------------------------------------------------------------------------------------------------------


def test_rms_norm():
    x, gamma = leaf(3, 2, 6), leaf(6)
    y, rstd = torch_npu.npu_rms_norm(x, gamma, epsilon=0.1)
    root = (sum(x[..., i] ** 2 for i in range(6)) / 6 + 0.1).sqrt().unsqueeze(-1)
    torch.testing.assert_close((y, rstd), (x / root * gamma, 1 / root))
    assert gradcheck(lambda *a: torch_npu.npu_rms_norm(*a, 0.1)[0], (x, gamma))


@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dim):
    x = leaf(3, 4, 6)
    a, b = x.split(x.shape[dim] // 2, dim)
    torch.testing.assert_close(torch_npu.npu_swiglu(x, dim=dim), a / (1 + (-a).exp()) * b)
    assert gradcheck(lambda x: torch_npu.npu_swiglu(x, dim), (x,))


@pytest.mark.parametrize(("mode", "number"), [("half", 0), ("interleave", 1)])
def test_rotary(mode, number):
    x, angle = leaf(5, 2, 3, 8), torch.rand(5, 1, 1, 4, dtype=torch.float64) * 6
    wide = torch.cat((angle, angle), -1) if mode == "half" else angle.repeat_interleave(2, -1)
    cos, sin = wide.cos().requires_grad_(), wide.sin().requires_grad_()
    pairs = (x[..., :4], x[..., 4:]) if mode == "half" else (x[..., 0::2], x[..., 1::2])
    turned = torch.complex(*pairs) * torch.polar(torch.ones_like(angle), angle)  # rotation, as multiplication
    parts = (turned.real, turned.imag)
    expected = torch.cat(parts, -1) if mode == "half" else torch.stack(parts, -1).flatten(-2)
    torch.testing.assert_close(torch_npu.npu_rotary_mul(x, cos, sin, mode), expected)
    torch.testing.assert_close(mindspeed_ops.npu_rotary_position_embedding(x, cos, sin, number), expected)
    assert gradcheck(lambda *a: torch_npu.npu_rotary_mul(*a, mode), (x, cos, sin))


# -- AdamW ------------------------------------------------------------------------------------------------------------

LR, BETAS, EPS, DECAY = 0.1, (0.8, 0.9), 1e-3, 0.2


@pytest.mark.parametrize("op", ["torch_npu", "builder"])
def test_adamw_equals_torch_over_steps(op):
    param, m, v = randn(5), *torch.zeros(2, 5, dtype=torch.float64)
    plain = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([plain], LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    for step, grad in enumerate(randn(4, 5) * torch.tensor([[5.0], [1.0], [0.1], [0.1]]), 1):
        plain.grad = grad.clone()
        optimizer.step()
        if op == "torch_npu":  # powers are those of the step before
            powers = [beta ** (step - 1) for beta in BETAS]
            call = *powers, LR, DECAY, *BETAS, EPS, grad, None, False, False
            found = torch_npu.npu_apply_adam_w(*call, out=(param, m, v))
            assert found[0] is param and found[1] is m and found[2] is v  # in place
        else:
            rest = torch.tensor([step]), LR, *BETAS, DECAY, EPS, False, False
            mindspeed_ops.npu_apply_fused_adamw_v2(param, grad, m, v, v, *rest)
    torch.testing.assert_close(param, plain.detach())


# -- order of tokens --------------------------------------------------------------------------------------------------

INDICES = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])


@pytest.mark.parametrize("permute", [torch_npu.npu_moe_token_permute, mindspeed_ops.npu_moe_token_permute])
def test_permute_puts_tokens_in_the_order_of_experts(permute):
    tokens = randn(4, 3)
    rows, places = permute(tokens, INDICES)
    by_expert = [(t, c) for expert in range(3) for t in range(4) for c in range(2) if INDICES[t, c] == expert]
    assert torch.equal(rows, torch.stack([tokens[t] for t, _ in by_expert]))
    assert places.dtype == torch.int32 and [by_expert[i] for i in places] == [(t, c) for t in range(4) for c in (0, 1)]
    cut, same = permute(tokens, INDICES, 5)
    assert torch.equal(cut, rows[:5]) and torch.equal(same, places)
    assert torch.equal(permute(tokens, INDICES, -2)[0], rows[:-2])
    one, _ = permute(tokens, torch.tensor([2, 0, 1, 0]))
    assert torch.equal(one, tokens[[1, 3, 2, 0]])


def test_unpermute_sums_what_permute_spread():
    tokens, probs = randn(4, 3), torch.rand(4, 2, dtype=torch.float64)
    rows, places = torch_npu.npu_moe_token_permute(tokens, INDICES)
    for unpermute in (torch_npu.npu_moe_token_unpermute, mindspeed_ops.npu_moe_token_unpermute):
        torch.testing.assert_close(unpermute(rows, places, probs), tokens * probs.sum(1, keepdim=True))
    scaled = rows * torch.arange(1, 9).unsqueeze(1)
    expected = torch.stack([sum(scaled[places[2 * t + c]] * probs[t, c] for c in range(2)) for t in range(4)])
    torch.testing.assert_close(torch_npu.npu_moe_token_unpermute(scaled, places, probs), expected)
    cut, _ = torch_npu.npu_moe_token_permute(tokens, INDICES, 7)
    rows[7] = 0  # rows that were cut off count as zero
    found, expected = (torch_npu.npu_moe_token_unpermute(x, places, probs) for x in (cut, rows))
    assert torch.equal(found, expected)
    rows, places = torch_npu.npu_moe_token_permute(tokens, INDICES[:, 0])
    assert torch.equal(torch_npu.npu_moe_token_unpermute(rows, places), tokens)


# -- routing ----------------------------------------------------------------------------------------------------------


def deepseek_v3_routing(x, bias, groups, kept_groups, k, scaling):
    """The published formula, one token at a time."""
    weights, chosen = [], []
    for row in x:
        scores = 1 / (1 + (-row).exp())
        choice = (scores + bias).view(groups, -1)
        value = choice.sort(-1, descending=True).values[:, :2].sum(-1)
        best = value.sort(descending=True).indices[:kept_groups]
        allowed = {int(g) * choice.shape[1] + j for g in best for j in range(choice.shape[1])}
        order = [int(e) for e in (scores + bias).sort(descending=True).indices if int(e) in allowed][:k]
        weights.append(scores[order] / scores[order].sum() * scaling)
        chosen.append(order)
    return torch.stack(weights), torch.tensor(chosen)


def test_gating_is_deepseek_v3s():
    x, bias = randn(64, 16), randn(16) * 0.3
    expected, chosen = deepseek_v3_routing(x, bias, 4, 2, 3, 2.5)

    def gate(**more):
        more |= {"bias": bias, "k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
        return torch_npu.npu_moe_gating_top_k(x, 3, **more)

    weights, ids, out = gate(routed_scaling_factor=2.5)
    assert torch.equal(ids, chosen.int()) and ids.dtype == torch.int32 and out.numel() == 0
    torch.testing.assert_close(weights, expected)
    raw = x.sigmoid().gather(1, chosen)
    torch.testing.assert_close(gate(eps=0.5)[0], raw / (raw.sum(1, keepdim=True) + 0.5))


# -- grouped products -------------------------------------------------------------------------------------------------

COUNTS, ENDS = [3, 0, 2, 4], [3, 3, 5, 9]  # rows of each expert; one has none
E, M, K, N = len(COUNTS), 9, 5, 6


def by_loop(x, weight):
    return torch.cat([rows @ weight[e] for e, rows in enumerate(x.split(COUNTS))])


def by_columns(x, grad):
    return torch.stack([a.T @ b for a, b in zip(x.split(COUNTS), grad.split(COUNTS), strict=True)])


@pytest.mark.parametrize(("groups", "kind"), [(torch.tensor(ENDS), 0), (torch.tensor(COUNTS), 1), (ENDS, 0)])
def test_grouped_matmul_forward_and_backward(groups, kind):
    x, weight = leaf(M, K), leaf(E, K, N)
    expected, grad = by_loop(x, weight), randn(M, N)
    dx, dw = torch.autograd.grad(expected, (x, weight), grad)
    (found,) = mindspeed_ops.npu_gmm([x], [weight], [], groups, 0, kind)
    more = {"group_list": groups, "group_list_type": kind, "group_type": 0, "split_item": 3}
    made = [found, *torch_npu.npu_grouped_matmul([x], [weight], **more)]
    assert not any(each.requires_grad for each in made)  # MindSpeed's autograd.Function has the gradient
    torch.testing.assert_close(made, [expected] * 2)
    gradients = mindspeed_ops.npu_gmm_backward([grad], [x], [weight], groups, kind)
    torch.testing.assert_close(gradients, ([dx], [dw], []))
    torch.testing.assert_close(mindspeed_ops.npu_gmm_backward_fusion([grad], [weight], groups, kind), ([dx], [], []))


def test_weight_gradients_are_added_in_place():
    x, grad = torch.randn(M, K), torch.randn(M, N)
    main, total = torch.ones(E * K, N), torch.ones(N, K)  # MindSpeed keeps the first flat
    mindspeed_ops.npu_groupmatmul_add_fp32(x, grad, torch.tensor(ENDS), main)
    torch.testing.assert_close(main.view(E, K, N), by_columns(x, grad) + 1)
    mindspeed_ops.npu_matmul_add_fp32(grad, x, total)
    torch.testing.assert_close(total, grad.T @ x + 1)
