"""Compute RMS norm, SwiGLU, rotary embedding and AdamW, as torch_npu's operators and MindSpeed's op builders do."""

from __future__ import annotations

import torch
from torch.nn.functional import silu

from verl_patches.reference import demand, demand_one_dtype, to_fp32


def npu_rms_norm(input, gamma, epsilon):
    """Return RMS norm over gamma's dimensions in input's dtype, and 1 / RMS in fp32, where these have width 1."""
    dims, shape = gamma.dim(), list(input.shape)
    fits = 0 < dims <= input.dim() and input.shape[-dims:] == gamma.shape
    demand(fits, f"gamma {list(gamma.shape)} must have the last dimensions of input {shape}")
    fits = gamma.dtype in (input.dtype, torch.float32)
    demand(fits, f"gamma is {gamma.dtype}, input {input.dtype}: they must be of one dtype, or gamma float32")
    x = to_fp32(input)
    over = tuple(range(-dims, 0))
    rstd = torch.rsqrt(x.square().mean(over, keepdim=True) + epsilon)
    return (x * rstd * to_fp32(gamma)).to(input.dtype), rstd


def npu_swiglu(input, dim):
    """Return silu(first half) * second half along `dim`, whose width must be even."""
    demand(input.shape[dim] % 2 == 0, f"width {input.shape[dim]} along dim {dim} must be even")
    first, second = input.chunk(2, dim)
    return (silu(to_fp32(first)) * to_fp32(second)).to(input.dtype)


def npu_rotary_mul(input, r1, r2, rotary_mode):
    """Return input * r1 + rotated input * r2 over the last of four dimensions; r1, r2 (cos, sin) broadcast to input.

    rotary_mode "half" rotates halves, (a, b) -> (-b, a); "interleave" rotates neighbours.
    """
    known = rotary_mode in ("half", "interleave")
    demand(known, f"rotary_mode is {rotary_mode!r}, expected 'half' or 'interleave'")
    return rotate(input, r1, r2, rotary_mode == "interleave")


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return x * cos + rotated x * sin, [B, S, N, D] in any order of the first three; cos and sin may broadcast."""
    dims, shape, width = [x.dim(), cos.dim(), sin.dim()], list(x.shape), x.shape[-1]
    demand(dims == [4, 4, 4], f"all must have 4 dimensions, found {dims}")
    fits = cos.shape == sin.shape and cos.shape[-1] == width
    demand(fits, f"cos {list(cos.shape)} and sin {list(sin.shape)} must be equal in shape and as wide as x {shape}")
    fits = all(c in (1, n) for c, n in zip(cos.shape, x.shape, strict=True))
    demand(fits, f"cos {list(cos.shape)} does not broadcast to x {shape}")
    demand(width % 2 == 0, f"head width {width} must be even")
    inner = to_fp32(x)
    if interleaved:
        even, odd = inner[..., 0::2], inner[..., 1::2]
        turned = torch.stack((-odd, even), -1).flatten(-2)
    else:
        first, second = inner.chunk(2, -1)
        turned = torch.cat((-second, first), -1)
    return (inner * to_fp32(cos) + turned * to_fp32(sin)).to(x.dtype)


def rotate_interleaved(x, cos, sin):
    """Rotate x [B, N, S, R], whose pairs are neighbours; the result has its pairs in halves."""
    return rotate(x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2), cos, sin, interleaved=False)


def npu_interleave_rope(x, cos, sin):
    """Apply DeepSeek's interleaved rotary embedding to x [B, N, S, R]; cos and sin are [B, 1, 1 or S, R].

    The result has its pairs in halves.
    """
    demand_one_dtype(x=x, cos=cos, sin=sin)
    return rotate_interleaved(x, cos, sin)


def _npu_rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox_style):
    """Rotate query [T, N * head_size] and key in place; cos_sin_cache [positions, R] holds cosines, then sines.

    With is_neox_style the halves of a head are pairs, else neighbours are. A head must be as wide as cos_sin_cache.
    """
    width = cos_sin_cache.shape[-1]
    demand(width == head_size, f"cos_sin_cache must be head_size {head_size} wide, found {width}")
    demand_one_dtype(query=query, key=key, cos_sin_cache=cos_sin_cache)
    positions = positions.long().flatten()
    rows = [len(positions), len(query), len(key)]
    demand(len(set(rows)) == 1, f"positions, query and key must have equally many rows, found {rows}")
    fits = bool(((positions >= 0) & (positions < len(cos_sin_cache))).all())
    demand(fits, f"positions must be 0 to {len(cos_sin_cache) - 1}, the rows of cos_sin_cache")
    cos, sin = cos_sin_cache[positions].chunk(2, -1)
    for x in (query, key):
        heads = x.view(1, len(x), -1, head_size)
        if is_neox_style:
            both = (torch.cat((part, part), -1) for part in (cos, sin))
        else:
            both = (part.repeat_interleave(2, -1) for part in (cos, sin))
        cosines, sines = (part[None, :, None] for part in both)
        x.copy_(rotate(heads, cosines, sines, interleaved=not is_neox_style).view(x.shape))


def npu_apply_adam_w(beta1_power, beta2_power, beta1, beta2, epsilon, grad, amsgrad, out, lr, weight_decay, maximize):
    """Make one AdamW step on out=(parameter, first moment, second moment); change all in place and return them.

    beta1_power and beta2_power are the powers of the step before (beta ** (step - 1)): the kernel multiplies once more.
    Without `out` the real function refuses; this one raises TypeError.
    """
    demand(len(out) == 3, f"out must be (var, m, v), found {len(out)} tensors")
    demand(not amsgrad and not maximize, "amsgrad and maximize must be False: the reference does not support them")
    powers = beta1_power * beta1, beta2_power * beta2
    adam_w(*out, grad, (beta1, beta2), powers, lr, weight_decay, epsilon)
    return tuple(out)


@torch.no_grad()
def adam_w(param, exp_avg, exp_avg_sq, grad, betas, powers, lr, weight_decay, eps) -> None:
    """Make one AdamW step in place; `powers` are beta ** step, from which it corrects the moments' bias."""
    shapes = {tuple(x.shape) for x in (param, exp_avg, exp_avg_sq, grad)}
    demand(len(shapes) == 1, f"parameter, moments and gradient must have one shape, found {sorted(shapes)}")
    grad = grad.to(exp_avg.dtype)
    exp_avg.mul_(betas[0]).add_(grad, alpha=1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    denominator = (exp_avg_sq / (1 - powers[1])).sqrt_().add_(eps)
    param.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, denominator, value=-lr / (1 - powers[0]))


def npu_add_rms_norm(x1, x2, gamma, epsilon):
    """Return (RMS norm of x1 + x2, reciprocal root in fp32, x1 + x2)."""
    demand_one_dtype(x1=x1, x2=x2, gamma=gamma)
    demand(x1.shape == x2.shape, f"x1 {list(x1.shape)} and x2 {list(x2.shape)} must be of one shape")
    total = x1 + x2
    normed, rstd = npu_rms_norm(total, gamma, epsilon)
    return normed, rstd, total
