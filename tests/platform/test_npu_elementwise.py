"""Norm, activation, rotary, softmax and casts: against fp64 formulas written here, and by gradcheck."""

import pytest
import torch
from torch.autograd import gradcheck

from verl_patches.platform.cpu.ascend import mindspeed_ops
from verl_patches.platform.cpu.ascend.packages import torch_npu


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(1)


def leaf(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def test_rms_norm():
    x, gamma = leaf(3, 2, 6), leaf(6)
    y, rstd = torch_npu.npu_rms_norm(x, gamma, epsilon=0.1)
    root = (sum(x[..., i] ** 2 for i in range(6)) / 6 + 0.1).sqrt().unsqueeze(-1)
    torch.testing.assert_close(y, x / root * gamma)
    torch.testing.assert_close(rstd, 1 / root)
    assert gradcheck(lambda *a: torch_npu.npu_rms_norm(*a, 0.1)[0], (x, gamma))


def test_rms_norm_over_two_dimensions_and_in_bf16():
    x, gamma = torch.randn(5, 4, 6), torch.randn(4, 6)
    y, rstd = torch_npu.npu_rms_norm(x, gamma)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (4, 6), gamma, 1e-6))
    assert rstd.shape == (5, 1, 1)
    low, rstd = torch_npu.npu_rms_norm(x.bfloat16(), gamma.bfloat16())
    assert (low.dtype, rstd.dtype) == (torch.bfloat16, torch.float32)
    exact = torch_npu.npu_rms_norm(x.bfloat16().double(), gamma.bfloat16().double())[0]
    assert torch.equal(low, exact.bfloat16())  # rounded once


@pytest.mark.parametrize("dim", [-1, 1])
def test_swiglu(dim):
    x = leaf(3, 4, 6)
    a, b = x.split(x.shape[dim] // 2, dim)
    y = torch_npu.npu_swiglu(x, dim=dim)
    torch.testing.assert_close(y, a / (1 + (-a).exp()) * b)
    assert gradcheck(lambda x: torch_npu.npu_swiglu(x, dim), (x,))
    grad = torch.randn_like(y)
    expected = torch.autograd.grad(y, x, grad)[0]
    torch.testing.assert_close(torch_npu.npu_swiglu_backward(grad, x, dim=dim), expected)


@pytest.mark.parametrize(("mode", "number"), [("half", 0), ("interleave", 1)])
def test_rotary(mode, number):
    x, angle = leaf(5, 2, 3, 8), torch.rand(5, 1, 1, 4, dtype=torch.float64) * 6
    wide = torch.cat((angle, angle), -1) if mode == "half" else angle.repeat_interleave(2, -1)
    cos, sin = wide.cos(), wide.sin()
    pairs = (x[..., :4], x[..., 4:]) if mode == "half" else (x[..., 0::2], x[..., 1::2])
    turned = torch.complex(*pairs) * torch.polar(torch.ones_like(angle), angle)  # rotation, as multiplication
    parts = (turned.real, turned.imag)
    expected = torch.cat(parts, -1) if mode == "half" else torch.stack(parts, -1).flatten(-2)
    torch.testing.assert_close(torch_npu.npu_rotary_mul(x, cos, sin, mode), expected)
    torch.testing.assert_close(mindspeed_ops.npu_rotary_position_embedding(x, cos, sin, number), expected)
    cos, sin = cos.clone().requires_grad_(), sin.clone().requires_grad_()
    assert gradcheck(lambda *a: torch_npu.npu_rotary_mul(*a, mode), (x, cos, sin))


def test_rotary_modes_differ_and_half_is_the_default():
    x, cos, sin = (torch.randn(1, 1, 1, 8) for _ in range(3))
    half, other = (torch_npu.npu_rotary_mul(x, cos, sin, mode) for mode in ("half", "interleave"))
    assert torch.equal(torch_npu.npu_rotary_mul(x, cos, sin), half) and not torch.allclose(half, other)
    assert torch.equal(mindspeed_ops.npu_rotary_position_embedding(x, cos, sin), half)


@pytest.mark.parametrize("triangle", [False, True])
def test_scaled_masked_softmax(triangle):
    x, mask = leaf(2, 3, 5, 5), torch.rand(2, 1, 5, 5) < 0.3
    used = torch.ones(5, 5, dtype=torch.bool).triu(1) if triangle else mask
    weights = (x * 0.3).exp() * ~used
    y = torch_npu.npu_scaled_masked_softmax(x, mask, 0.3, triangle)
    torch.testing.assert_close(y, weights / weights.sum(-1, keepdim=True))
    assert gradcheck(lambda x: torch_npu.npu_scaled_masked_softmax(x, mask, 0.3, triangle), (x,))


def test_a_row_that_is_all_masked_is_even():
    y = torch_npu.npu_scaled_masked_softmax(torch.randn(1, 1, 1, 4), torch.ones(1, 1, 1, 4, dtype=torch.bool))
    torch.testing.assert_close(y, torch.full((1, 1, 1, 4), 0.25))


def test_transpose_cast_and_format():
    x = leaf(2, 3, 4)
    assert torch.equal(torch_npu.npu_confusion_transpose(x, [1, 0, 2], [3, 8], True), x.transpose(0, 1).reshape(3, 8))
    assert torch.equal(torch_npu.npu_confusion_transpose(x, [1, 0], [6, 4], False), x.reshape(6, 4).T)
    assert gradcheck(lambda x: torch_npu.npu_confusion_transpose(x, [1, 0, 2], [3, 8], True), (x,))
    assert torch_npu.npu_dtype_cast(x, torch.bfloat16).dtype == torch.bfloat16
    assert torch_npu.npu_format_cast(x, 29) is x


X4 = torch.zeros(2, 2, 2, 6)
REFUSED = {
    "gamma of another width": (lambda: torch_npu.npu_rms_norm(X4, torch.ones(5)), "gamma"),
    "gamma in another dtype": (lambda: torch_npu.npu_rms_norm(X4, torch.ones(6, dtype=torch.bfloat16)), "one dtype"),
    "odd swiglu width": (lambda: torch_npu.npu_swiglu(torch.zeros(2, 5)), "must be even"),
    "swiglu along a dimension that is not there": (lambda: torch_npu.npu_swiglu(X4, 4), "dim is 4"),
    "swiglu gradient of another width": (lambda: torch_npu.npu_swiglu_backward(X4, X4), "half of input"),
    "unknown rotary mode": (lambda: torch_npu.npu_rotary_mul(X4, X4, X4, "quarter"), "rotary_mode is 'quarter'"),
    "unknown number of it": (lambda: mindspeed_ops.npu_rotary_position_embedding(X4, X4, X4, 2), "mode must be 0"),
    "rotary of three dimensions": (lambda: torch_npu.npu_rotary_mul(X4[0], X4[0], X4[0]), "4 dimensions"),
    "cos of another width": (lambda: torch_npu.npu_rotary_mul(X4, X4[..., :3], X4[..., :3]), "as wide as"),
    "cos that does not broadcast": (lambda: torch_npu.npu_rotary_mul(X4, X4.repeat(2, 1, 1, 1), X4.repeat(2, 1, 1, 1)),
                                    "does not broadcast"),
    "odd head width": (lambda: torch_npu.npu_rotary_mul(X4[..., :5], X4[..., :5], X4[..., :5]), "must be even"),
    "softmax of three dimensions": (lambda: torch_npu.npu_scaled_masked_softmax(X4[0], X4[0] > 0), "4 dimensions"),
    "mask of floats": (lambda: torch_npu.npu_scaled_masked_softmax(X4, X4), "must be bool"),
    "mask too large": (lambda: torch_npu.npu_scaled_masked_softmax(X4[:1], X4 > 0), "does not broadcast"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        call()
