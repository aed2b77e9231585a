"""Token order, routing and grouped products: against loops in fp64, and by gradcheck."""

import pytest
import torch
from torch.autograd import gradcheck

from verl_patches.platform.cpu.ascend import mindspeed_ops
from verl_patches.platform.cpu.ascend.packages import torch_npu

COUNTS = [3, 0, 2, 4]  # rows of each expert; one has none
ENDS = [3, 3, 5, 9]
E, M, K, N = len(COUNTS), 9, 5, 6


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


# -- token order ------------------------------------------------------------------------------------------------------

INDICES = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]])


@pytest.mark.parametrize("permute", [torch_npu.npu_moe_token_permute, mindspeed_ops.npu_moe_token_permute])
def test_permute_puts_tokens_in_the_order_of_experts(permute):
    tokens = randn(4, 3)
    rows, places = permute(tokens, INDICES)
    by_expert = [(t, c) for expert in range(3) for t in range(4) for c in range(2) if INDICES[t, c] == expert]
    assert torch.equal(rows, torch.stack([tokens[t] for t, _ in by_expert]))
    assert places.dtype == torch.int32
    for t in range(4):
        for c in range(2):
            assert by_expert[places[2 * t + c]] == (t, c)
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
    rows, places = torch_npu.npu_moe_token_permute(tokens, INDICES[:, 0])
    assert torch.equal(torch_npu.npu_moe_token_unpermute(rows, places), tokens)


def test_rows_that_were_cut_off_count_as_zero():
    tokens, probs = randn(4, 3), torch.ones(4, 2, dtype=torch.float64)
    rows, places = torch_npu.npu_moe_token_permute(tokens, INDICES, 7)
    full, _ = torch_npu.npu_moe_token_permute(tokens, INDICES)
    full[7] = 0
    assert torch.equal(
        torch_npu.npu_moe_token_unpermute(rows, places, probs), torch_npu.npu_moe_token_unpermute(full, places, probs)
    )


def test_gradients_of_token_order():
    tokens, probs = randn(4, 3).requires_grad_(), torch.rand(4, 2, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda t: torch_npu.npu_moe_token_permute(t, INDICES, 6)[0], (tokens,))

    def there_and_back(t, p):
        rows, places = torch_npu.npu_moe_token_permute(t, INDICES)
        return torch_npu.npu_moe_token_unpermute(rows * rows, places, p)

    assert gradcheck(there_and_back, (tokens, probs))


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
    weights, ids, out = torch_npu.npu_moe_gating_top_k(
        x, 3, bias=bias, k_group=2, group_count=4, group_select_mode=1, norm_type=1, routed_scaling_factor=2.5
    )
    assert torch.equal(ids, chosen.int()) and ids.dtype == torch.int32 and out.numel() == 0
    torch.testing.assert_close(weights, expected)
    raw = x.sigmoid().gather(1, chosen)
    with_eps = torch_npu.npu_moe_gating_top_k(
        x, 3, bias=bias, k_group=2, group_count=4, group_select_mode=1, norm_type=1, eps=0.5
    )[0]
    torch.testing.assert_close(with_eps, raw / (raw.sum(1, keepdim=True) + 0.5))
    other = torch_npu.npu_moe_gating_top_k(x, 3, bias=bias, k_group=2, group_count=4, group_select_mode=0, norm_type=1)
    assert not torch.equal(other[1], ids)  # the best of a group, not the sum of two


def test_softmax_gating():
    x = randn(5, 4)
    scores = x.exp() / x.exp().sum(-1, keepdim=True)
    expected, order = scores.sort(-1, descending=True)
    weights, ids, out = torch_npu.npu_moe_gating_top_k(x, 2, out_flag=True)
    torch.testing.assert_close(weights, expected[:, :2])
    torch.testing.assert_close(out, scores)
    assert torch.equal(ids, order[:, :2].int())
    weights, ids, rows = torch_npu.npu_moe_gating_top_k_softmax(x, torch.tensor([0, 1, 0, 0, 0]).bool(), 2)
    torch.testing.assert_close(weights, expected[:, :2])
    assert ids[1].tolist() == [4, 4] and torch.equal(ids[[0, 2, 3, 4]], order[[0, 2, 3, 4], :2].int())
    assert rows.tolist() == [[0, 5], [1, 6], [2, 7], [3, 8], [4, 9]]


# -- grouped products -------------------------------------------------------------------------------------------------


def by_loop(x, weight):
    return torch.cat([rows @ weight[e] for e, rows in enumerate(x.split(COUNTS))])


FORMS = {"ends": (torch.tensor(ENDS), 0), "counts": (torch.tensor(COUNTS), 1), "list": (ENDS, 0)}


@pytest.mark.parametrize("form", FORMS)
def test_grouped_matmul_forward_and_backward(form):
    groups, kind = FORMS[form]
    x, weight = randn(M, K).requires_grad_(), randn(E, K, N).requires_grad_()
    expected, grad = by_loop(x, weight), randn(M, N)
    dx, dw = torch.autograd.grad(expected, (x, weight), grad)
    found = mindspeed_ops.npu_gmm([x], [weight], [], groups, 0, kind)
    assert len(found) == 1 and not found[0].requires_grad  # MindSpeed's autograd.Function has the gradient
    torch.testing.assert_close(found[0], expected)
    mine = mindspeed_ops.npu_gmm_backward([grad], [x], [weight], groups, kind)
    torch.testing.assert_close(mine, ([dx], [dw], []))
    assert mine[1][0][1].count_nonzero() == 0  # the expert without rows
    torch.testing.assert_close(mindspeed_ops.npu_gmm_backward_fusion([grad], [weight], groups, kind), ([dx], [], []))
    ours = torch_npu.npu_grouped_matmul(
        [x], [weight], group_list=groups, group_list_type=kind, group_type=0, split_item=3
    )
    torch.testing.assert_close(ours, [expected.detach()])
    assert not ours[0].requires_grad  # as on a device


def test_grouped_matmul_by_columns_pairs_bias_and_dtype():
    x, grad = randn(M, K), randn(M, N)
    expected = torch.stack([a.T @ b for a, b in zip(x.split(COUNTS), grad.split(COUNTS), strict=True)])
    found = torch_npu.npu_grouped_matmul([x.T], [grad], group_list=ENDS, group_type=2, split_item=3)
    torch.testing.assert_close(found, [expected])
    weights, bias = list(randn(E, K, N)), list(randn(E, N))
    pairs = torch_npu.npu_grouped_matmul(list(x.split(COUNTS)), weights, bias=bias, group_type=-1)
    assert [len(y) for y in pairs] == COUNTS
    torch.testing.assert_close(pairs[3], x[5:] @ weights[3] + bias[3])
    one = torch_npu.npu_grouped_matmul(list(x.split(COUNTS)), weights, split_item=2, output_dtype=torch.float32)
    torch.testing.assert_close(one, [by_loop(x, torch.stack(weights)).float()])


def test_weight_gradients_are_added_in_place():
    x, grad = torch.randn(M, K), torch.randn(M, N)
    main = torch.ones(E * K, N)  # MindSpeed keeps it flat
    expected = torch.stack([a.T @ b for a, b in zip(x.split(COUNTS), grad.split(COUNTS), strict=True)]) + 1
    mindspeed_ops.npu_groupmatmul_add_fp32(x, grad, torch.tensor(ENDS), main)
    torch.testing.assert_close(main.view(E, K, N), expected)
    total = torch.ones(N, K)
    mindspeed_ops.npu_matmul_add_fp32(grad, x, total)
    torch.testing.assert_close(total, grad.T @ x + 1)


X, W, G = torch.zeros(M, K), torch.zeros(E, K, N), torch.tensor(ENDS)
ROUTE = torch.zeros(2, 8)
REFUSED = {
    "K differs": (lambda: torch_npu.npu_grouped_matmul([X], [W[:, :4]], group_list=G, group_type=0), "K differs, 5"),
    "fp32 x bf16": (lambda: torch_npu.npu_grouped_matmul([X], [W.bfloat16()], group_list=G, group_type=0), "one dtype"),
    "pairs: K differs": (lambda: torch_npu.npu_grouped_matmul([X], [W[0, :4]]), "K differs"),
    "pairs: fp32 x bf16": (lambda: torch_npu.npu_grouped_matmul([X], [W[0].bfloat16()]), "one dtype"),
    "builder: K differs": (lambda: mindspeed_ops.npu_gmm([X], [W[:, :4]], [], G, 0, 0), "K differs"),
    "builder: fp32 x bf16": (lambda: mindspeed_ops.npu_gmm([X.bfloat16()], [W], [], G, 0, 0), "one dtype"),
    "other number of groups": (lambda: mindspeed_ops.npu_gmm([X], [W[:3]], [], G, 0, 0), "4 groups need weight"),
    "groups do not cover the rows": (lambda: mindspeed_ops.npu_gmm([X], [W], [], G - 1, 0, 0), "covers 8 rows"),
    "counts given as ends": (lambda: mindspeed_ops.npu_gmm([X], [W], [], torch.tensor([2, 2, 2, 3]), 0, 0), "given as"),
    "int32 groups": (lambda: mindspeed_ops.npu_gmm([X], [W], [], G.int(), 0, 0), "int64"),
    "no groups": (lambda: mindspeed_ops.npu_gmm([X], [W], [], None, 0, 0), "group_list is missing"),
    "unknown group type": (lambda: mindspeed_ops.npu_gmm([X], [W], [], G, 1, 0), "group_type must be"),
    "unknown list type": (lambda: mindspeed_ops.npu_gmm([X], [W], [], G, 0, 2), "group_list_type must be"),
    "columns: M differs": (lambda: mindspeed_ops.npu_gmm([X.T], [X[:4]], [], G, 2, 0), "M differs"),
    "quantised": (lambda: torch_npu.npu_grouped_matmul([X], [W], scale=[X], group_list=G, group_type=0), "scale"),
    "gradient not fp32": (lambda: mindspeed_ops.npu_groupmatmul_add_fp32(X, X, G, W.bfloat16()), "must be float32"),
    "gradient of another size": (lambda: mindspeed_ops.npu_groupmatmul_add_fp32(X, X, G, W), "must hold"),
    "C not fp32": (lambda: mindspeed_ops.npu_matmul_add_fp32(X, X, W[0].bfloat16()), "must be float32"),
    "x and weight differ": (lambda: mindspeed_ops.npu_matmul_add_fp32(X, X[:3], W[0]), "must be \\[M, N\\]"),
    "padded permute": (lambda: torch_npu.npu_moe_token_permute(X, G, None, True), "padded_mode"),
    "indices of floats": (lambda: torch_npu.npu_moe_token_permute(X, torch.zeros(M)), "int32 or int64"),
    "indices for other tokens": (lambda: torch_npu.npu_moe_token_permute(X, G), "4 rows of indices for 9"),
    "probs for other tokens": (lambda: torch_npu.npu_moe_token_unpermute(X, torch.arange(M).int(), X), "must hold 9"),
    "renorm": (lambda: torch_npu.npu_moe_gating_top_k(ROUTE, 2, renorm=1), "renorm must be 0"),
    "over what groups hold": (lambda: torch_npu.npu_moe_gating_top_k(ROUTE, 3, k_group=1, group_count=4), "more than"),
    "uneven groups": (lambda: torch_npu.npu_moe_gating_top_k(ROUTE, 2, group_count=3), "multiple of group_count"),
    "bias of another width": (lambda: torch_npu.npu_moe_gating_top_k(ROUTE, 2, bias=torch.zeros(4)), "bias must be"),
    "k over E": (lambda: torch_npu.npu_moe_gating_top_k_softmax(ROUTE, None, 9), "E >= k"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
