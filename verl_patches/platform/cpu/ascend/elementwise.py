"""Norm, activation, rotary embedding, softmax, casts, AdamW steps: torch_npu's functions, and what builders share."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from verl_patches.platform.cpu.ascend.checked import demand, torch_npu_op, wide

_MASKED = -10000.0  # what the softmax kernel writes where the mask is set


@torch_npu_op
def npu_rms_norm(input, gamma, epsilon=1e-06):
    """Root mean square norm over gamma's dimensions: (y of input's dtype, reciprocal root in fp32, 1 in those)."""
    op, dims = "npu_rms_norm", gamma.dim()
    demand(
        0 < dims <= input.dim() and input.shape[-dims:] == gamma.shape,
        op,
        f"gamma {list(gamma.shape)} must have the last dimensions of input {list(input.shape)}",
    )
    demand(
        gamma.dtype in (input.dtype, torch.float32),
        op,
        f"gamma is {gamma.dtype}, input {input.dtype}: they must be of one dtype, or gamma float32",
    )
    x = wide(input)
    over = tuple(range(-dims, 0))
    rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + epsilon)
    return (x * rstd * wide(gamma)).to(input.dtype), rstd


@torch_npu_op
def npu_swiglu(input, dim=-1):
    """silu(first half) * second half along `dim`; its width must be even."""
    first, second = _halves("npu_swiglu", input, dim)
    return (silu(wide(first)) * wide(second)).to(input.dtype)


@torch_npu_op
def npu_swiglu_backward(grad_output, input, dim=-1):
    """Gradient of npu_swiglu for its input."""
    first, second = (wide(half) for half in _halves("npu_swiglu_backward", input, dim))
    demand(
        grad_output.shape == first.shape,
        "npu_swiglu_backward",
        f"grad_output {list(grad_output.shape)} must be half of input {list(input.shape)} along {dim}",
    )
    gate, grad = torch.sigmoid(first), wide(grad_output)
    d_first = grad * second * gate * (1 + first * (1 - gate))
    return torch.cat((d_first, grad * first * gate), dim).to(input.dtype)


def _halves(op, x, dim):
    demand(-x.dim() <= dim < x.dim(), op, f"dim is {dim}, input has {x.dim()} dimensions")
    demand(x.shape[dim] % 2 == 0, op, f"width {x.shape[dim]} along dim {dim} must be even")
    return x.chunk(2, dim)


@torch_npu_op
def npu_rotary_mul(input, r1, r2, rotary_mode="half"):
    """input * r1 + rotated input * r2 over the last of four dimensions; r1, r2 (cos, sin) broadcast to input.

    "half": (a, b) -> (-b, a) of halves; "interleave": of neighbours.
    """
    demand(
        rotary_mode in ("half", "interleave"),
        "npu_rotary_mul",
        f"rotary_mode is {rotary_mode!r}, expected 'half' or 'interleave'",
    )
    return rotate("npu_rotary_mul", input, r1, r2, rotary_mode == "interleave")


def rotate(op: str, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x * cos + rotated x * sin, [B, S, N, D] in any order of the first three; cos and sin 1 where they broadcast."""
    demand(
        x.dim() == cos.dim() == sin.dim() == 4,
        op,
        f"all must have 4 dimensions, found {x.dim()}, {cos.dim()}, {sin.dim()}",
    )
    demand(
        cos.shape == sin.shape and cos.shape[-1] == x.shape[-1],
        op,
        f"cos {list(cos.shape)} and sin {list(sin.shape)} must be equal in shape and as wide as x {list(x.shape)}",
    )
    demand(
        all(c in (1, n) for c, n in zip(cos.shape, x.shape, strict=True)),
        op,
        f"cos {list(cos.shape)} does not broadcast to x {list(x.shape)}",
    )
    demand(x.shape[-1] % 2 == 0, op, f"head width {x.shape[-1]} must be even")
    inner = wide(x)
    if interleaved:
        even, odd = inner[..., 0::2], inner[..., 1::2]
        turned = torch.stack((-odd, even), -1).flatten(-2)
    else:
        first, second = inner.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return (inner * wide(cos) + turned * wide(sin)).to(x.dtype)


@torch_npu_op
def npu_scaled_masked_softmax(x, mask, scale=1, fixed_triu_mask=False):
    """softmax of x * scale over the last dimension, -10000 where mask (bool, broadcasts) is set.

    With fixed_triu_mask the mask given is not looked at and everything above the diagonal is masked.
    """
    op = "npu_scaled_masked_softmax"
    demand(x.dim() == 4, op, f"x must have 4 dimensions, found {list(x.shape)}")
    demand(mask.dtype == torch.bool, op, f"mask must be bool, found {mask.dtype}")
    if fixed_triu_mask:
        mask = torch.ones(x.shape[-2:], dtype=torch.bool).triu(1)
    demand(
        mask.dim() <= 4 and torch.broadcast_shapes(mask.shape, x.shape) == x.shape,
        op,
        f"mask {list(mask.shape)} does not broadcast to x {list(x.shape)}",
    )
    return (wide(x) * scale).masked_fill(mask, _MASKED).softmax(-1).to(x.dtype)


@torch_npu_op
def npu_confusion_transpose(input, perm, shape, transpose_first):
    """Permute, then reshape (transpose_first), or the other way round."""
    return input.permute(perm).reshape(shape) if transpose_first else input.reshape(shape).permute(perm)


@torch_npu_op
def npu_dtype_cast(input, dtype):
    """input in another dtype."""
    return input.to(dtype)


@torch_npu_op
def npu_format_cast(input, acl_format):
    """input itself: storage formats exist on a device only."""
    return input


@torch_npu_op
def npu_apply_adam_w(
    beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm, amsgrad, maximize, *, out
):
    """One AdamW step on out=(parameter, first moment, second moment), all changed in place and returned.

    beta1_power and beta2_power are the powers of the step before (beta ** (step - 1)): the kernel multiplies once more.
    Without `out` the real function refuses; here it is a TypeError.
    """
    demand(len(out) == 3, "npu_apply_adam_w", f"out must be (var, m, v), found {len(out)} tensors")
    demand(not amsgrad or max_grad_norm is not None, "npu_apply_adam_w", "amsgrad needs max_grad_norm")
    adam_w(
        *out,
        grad,
        max_grad_norm if amsgrad else None,
        lr,
        beta1,
        beta2,
        beta1_power * beta1,
        beta2_power * beta2,
        weight_decay,
        epsilon,
        bool(maximize),
    )
    return tuple(out)


@torch.no_grad()
def adam_w(
    param,
    exp_avg,
    exp_avg_sq,
    grad,
    max_exp_avg_sq,
    lr,
    beta1,
    beta2,
    beta1_power,
    beta2_power,
    weight_decay,
    eps,
    maximize,
) -> None:
    """The step itself, with bias correction by 1 - power of this step; max_exp_avg_sq None: no amsgrad."""
    shapes = {tuple(x.shape) for x in (param, exp_avg, exp_avg_sq, grad)}
    demand(len(shapes) == 1, "AdamW", f"parameter, moments and gradient must have one shape, found {sorted(shapes)}")
    grad = (-grad if maximize else grad).to(exp_avg.dtype)
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        second = max_exp_avg_sq
    denominator = (second / (1 - beta2_power)).sqrt_().add_(eps)
    param.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1_power))
