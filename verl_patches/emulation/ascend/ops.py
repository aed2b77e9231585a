"""Implement torch_npu's norm, activation, rotary embedding, AdamW and mixture of experts in plain torch.

Letters of shapes: T tokens, H hidden, k experts a token, E experts, M rows in all, K and N the sides of one expert's
matrix.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import silu

from verl_patches.emulation.op_schemas import demand, demand_defaults, demand_one_dtype, to_fp32, torch_npu_op

# -- elementwise -------------------------------------------------------------------------------------------------------


@torch_npu_op
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


@torch_npu_op
def npu_swiglu(input, dim):
    """Return silu(first half) * second half along `dim`, whose width must be even."""
    demand(input.shape[dim] % 2 == 0, f"width {input.shape[dim]} along dim {dim} must be even")
    first, second = input.chunk(2, dim)
    return (silu(to_fp32(first)) * to_fp32(second)).to(input.dtype)


@torch_npu_op
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


@torch_npu_op
def npu_apply_adam_w(
    beta1_power, beta2_power, beta1, beta2, epsilon, grad, amsgrad, out, lr, weight_decay, maximize, **unused
):
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


# -- mixture of experts ------------------------------------------------------------------------------------------------


@torch_npu_op
def npu_moe_token_permute(tokens, indices, num_out_tokens, padded_mode):
    """Return tokens [T, H] in the order of their experts, [T * k, H], and the int32 place of each (token, choice).

    indices are [T, k] or [T]; tokens of one expert stay in order. num_out_tokens n > 0 takes the first n rows
    only, n < 0 drops the last -n; the places, argsort(argsort(indices)) as of aclnnMoeTokenPermute, are not cut.
    """
    demand(not padded_mode, "padded_mode must be False: a device does not support it either")
    shapes = f"{list(tokens.shape)} and {list(indices.shape)}"
    fits = tokens.dim() == 2 and indices.dim() in (1, 2)
    demand(fits, f"tokens must be [T, H] and indices [T, k] or [T], found {shapes}")
    demand(indices.dtype in (torch.int32, torch.int64), f"indices must be int32 or int64, found {indices.dtype}")
    demand(len(indices) == len(tokens), f"indices must have {len(tokens)} rows, one a token, found {len(indices)}")
    k = indices.shape[1] if indices.dim() == 2 else 1
    flat, limit = indices.flatten(), num_out_tokens or 0
    rows = min(limit, len(flat)) if limit > 0 else len(flat) + limit
    order = flat.argsort(stable=True)
    return tokens.index_select(0, order[:rows] // k), order.argsort().to(torch.int32)


@torch_npu_op
def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode):
    """Return [T, H]: for each token the sum of its k rows weighted by probs [T, k] (k is 1 without probs).

    sorted_indices [T * k] are the places from npu_moe_token_permute; rows that were cut off count as zero.
    """
    demand(not padded_mode, "padded_mode must be False: a device does not support it either")
    fits = permuted_tokens.dim() == 2 and sorted_indices.dim() == 1 and (probs is None or probs.dim() == 2)
    demand(fits, "permuted_tokens must be [M, H], sorted_indices [T * k], probs [T, k]")
    k = 1 if probs is None else probs.shape[1]
    places, width = len(sorted_indices), permuted_tokens.shape[1]
    if probs is not None:
        demand(probs.numel() == places, f"probs {list(probs.shape)} must hold {places} weights")
    cut = permuted_tokens.new_zeros(max(places - len(permuted_tokens), 0), width)
    rows = to_fp32(torch.cat((permuted_tokens, cut))).index_select(0, sorted_indices.long()).view(-1, k, width)
    total = rows.sum(1) if probs is None else (rows * to_fp32(probs).unsqueeze(-1)).sum(1)
    return total.to(permuted_tokens.dtype)


@torch_npu_op
@torch.no_grad()
def npu_moe_gating_top_k(
    x, k, bias, k_group, group_count, group_select_mode, renorm, norm_type, out_flag, routed_scaling_factor, eps
):
    """Route as DeepSeek-V3, without gradient: return (weights [T, k], their experts int32 [T, k], empty).

    Weights are sigmoids (norm_type 1), divided by their sum + eps; bias [E] is added for choosing only; of group_count
    groups the k_group best stay, by the sum of their best two experts (group_select_mode 1).
    """
    E, modes = x.shape[-1], (renorm, norm_type, group_select_mode, out_flag)
    fits = modes == (0, 1, 1, False)
    demand(fits, f"(renorm, norm_type, group_select_mode, out_flag) must be (0, 1, 1, False), found {modes}")
    fits = x.dim() == 2 and group_count > 0 and E % group_count == 0 and k_group <= group_count
    sizes = f"E a multiple of group_count {group_count} >= k_group {k_group}"
    demand(fits, f"x {list(x.shape)} must be [T, E], {sizes}")
    demand_one_dtype(x=x, bias=bias)
    most = k_group * (E // group_count)
    demand(k <= most, f"k must be at most {most}, the experts of {k_group} groups, found {k}")
    scores = to_fp32(x).sigmoid()
    choice = scores if bias is None else scores + to_fp32(bias)
    if group_count > 1:
        groups = choice.view(-1, group_count, E // group_count)
        value = groups.topk(min(2, groups.shape[-1])).values.sum(-1)
        best = torch.zeros_like(value, dtype=torch.bool).scatter_(1, value.topk(k_group).indices, True)
        choice = groups.masked_fill(~best.unsqueeze(-1), -torch.inf).flatten(1)
    experts = choice.topk(k).indices
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), scores.new_empty(0)


@torch_npu_op
@torch.no_grad()
def npu_grouped_matmul(x, weight, group_list, split_item, group_type, group_list_type, **unused):
    """Multiply x [M, K] by weight [E, K, N], group of rows by group: one input, weight and output; no gradient."""
    demand_defaults("npu_grouped_matmul", unused)
    found = f"{len(x)} inputs, {len(weight)} weights, group_type {group_type}, split_item {split_item}"
    demand(
        len(x) == len(weight) == 1 and group_type == 0 and split_item in (2, 3),
        f"expected 1 input, 1 weight, group_type 0 and split_item 2 or 3, found {found}",
    )
    return [grouped_matmul(x[0], weight[0], group_list, 0, group_list_type or 0)]


def _matmul(x, weight):
    demand(x.dtype == weight.dtype, f"x is {x.dtype}, weight {weight.dtype}: they must be of one dtype")
    k, rows = x.shape[-1], weight.shape[-2]
    demand(k == rows, f"x {list(x.shape)} and weight {list(weight.shape)}: K differs, {k} and {rows}")
    return (to_fp32(x) @ to_fp32(weight)).to(x.dtype)


def _group_bounds(group_list, group_list_type: int, rows: int) -> list[tuple[int, int]]:
    """Return the row range [first, last) of each group.

    group_list is cumulative (type 0) or holds counts (type 1), and must cover all rows.
    """
    demand(group_list is not None, "group_list must be given, found None")
    demand(group_list_type in (0, 1), f"group_list_type must be 0 or 1, found {group_list_type}")
    if isinstance(group_list, torch.Tensor):
        found = f"{group_list.dtype} of shape {list(group_list.shape)}"
        fits = group_list.dtype == torch.int64 and group_list.dim() == 1
        demand(fits, f"group_list must be a list of int64, found {found}")
        group_list = group_list.tolist()
    ends = list(group_list)
    if group_list_type == 1:
        ends = torch.tensor(ends, dtype=torch.int64).cumsum(0).tolist()
    bounds = list(pairwise([0, *ends]))
    demand(all(first <= last for first, last in bounds), f"group_list must not decrease, found ends {ends}")
    covered = ends[-1] if ends else 0
    hint = " (were counts given as cumulative ends?)" if group_list_type == 0 else ""
    covers = ends and covered == rows
    demand(covers, f"group_list covers {covered} rows of {rows}; a device leaves the others unwritten{hint}")
    return bounds


def grouped_matmul(x, weight, group_list, group_type, group_list_type):
    """Compute one product for each group: of rows (group_type 0), or of columns of x and rows of weight (2)."""
    demand(group_type in (0, 2), f"group_type must be 0 or 2, found {group_type}")
    demand(x.dtype == weight.dtype, f"x is {x.dtype}, weight {weight.dtype}: they must be of one dtype")
    demand(x.dim() == 2, f"x must have 2 dimensions, found {list(x.shape)}")
    shapes = f"x {list(x.shape)} and weight {list(weight.shape)}"
    if group_type == 2:
        rows = x.shape[1]
        bounds = _group_bounds(group_list, group_list_type, rows)
        fits = weight.dim() == 2 and len(weight) == rows
        demand(fits, f"{shapes}: M differs, {rows} and {len(weight)}")
        return torch.stack([_matmul(x[:, a:b], weight[a:b]) for a, b in bounds])
    bounds = _group_bounds(group_list, group_list_type, len(x))
    groups = len(bounds)
    fits = weight.dim() == 3 and len(weight) == groups
    demand(fits, f"{groups} groups need weight [{groups}, K, N], found {list(weight.shape)}")
    demand(x.shape[1] == weight.shape[1], f"{shapes}: K differs, {x.shape[1]} and {weight.shape[1]}")
    # Groups without rows, such as most experts in a small batch, need no product.
    filled = [(e, a, b) for e, (a, b) in enumerate(bounds) if a < b] or [(0, 0, 0)]
    return torch.cat([_matmul(x[a:b], weight[e]) for e, a, b in filled])
