"""Mixture of experts: routing, token order and grouped matrix products, for torch_npu and for the op builders.

T tokens, H hidden, k experts a token, E experts, M rows in all, K and N the sides of one expert's matrix.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from verl_patches.platform.cpu.ascend.checked import demand, torch_npu_op, wide


@torch_npu_op
def npu_moe_token_permute(tokens, indices, num_out_tokens=None, padded_mode=False):
    """(tokens [T, H] in the order of their experts, [T * k, H]; the place that each (token, choice) went to, int32).

    indices [T, k] or [T]; the order among tokens of one expert is kept. num_out_tokens n > 0 keeps the first n rows
    only, n < 0 drops the last -n; the places are not cut. (aclnnMoeTokenPermute: argsort of argsort.)
    """
    return permute("npu_moe_token_permute", tokens, indices, num_out_tokens or 0, padded_mode)


def permute(op, tokens, indices, num_out_tokens, padded_mode):
    demand(not padded_mode, op, "padded_mode is not supported by the device either")
    demand(
        tokens.dim() == 2 and indices.dim() in (1, 2),
        op,
        f"tokens must be [T, H] and indices [T, k] or [T], found {list(tokens.shape)} and {list(indices.shape)}",
    )
    demand(indices.dtype in (torch.int32, torch.int64), op, f"indices must be int32 or int64, found {indices.dtype}")
    demand(len(indices) == len(tokens), op, f"{len(indices)} rows of indices for {len(tokens)} tokens")
    k, flat = indices.shape[1] if indices.dim() == 2 else 1, indices.flatten()
    kept = min(num_out_tokens, len(flat)) if num_out_tokens > 0 else len(flat) + num_out_tokens
    order = flat.argsort(stable=True)
    return tokens.index_select(0, order[:kept] // k), order.argsort().to(torch.int32)


@torch_npu_op
def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    """The way back: [T, H], each token the sum of its k rows weighted by probs [T, k] (without: k is 1).

    sorted_indices [T * k] are the places that npu_moe_token_permute gave; rows that were cut off count as zero.
    """
    return unpermute("npu_moe_token_unpermute", permuted_tokens, sorted_indices, probs, padded_mode)


def unpermute(op, permuted_tokens, sorted_indices, probs, padded_mode):
    demand(not padded_mode, op, "padded_mode is not supported by the device either")
    demand(
        permuted_tokens.dim() == 2 and sorted_indices.dim() == 1 and (probs is None or probs.dim() == 2),
        op,
        "permuted_tokens must be [M, H], sorted_indices [T * k], probs [T, k]",
    )
    k = 1 if probs is None else probs.shape[1]
    demand(
        probs is None or probs.numel() == len(sorted_indices),
        op,
        f"probs {None if probs is None else list(probs.shape)} must hold {len(sorted_indices)} weights",
    )
    cut = permuted_tokens.new_zeros(max(len(sorted_indices) - len(permuted_tokens), 0), permuted_tokens.shape[1])
    rows = wide(torch.cat((permuted_tokens, cut))).index_select(0, sorted_indices.long())
    rows = rows.view(-1, k, permuted_tokens.shape[1])
    total = rows.sum(1) if probs is None else (rows * wide(probs).unsqueeze(-1)).sum(1)
    return total.to(permuted_tokens.dtype)


@torch_npu_op
@torch.no_grad()
def npu_moe_gating_top_k_softmax(x, finished=None, k=1):
    """(softmax scores of the k best, their experts int32, row numbers int32), each [T, k]; x [T, E]. No gradient.

    A token that is finished goes to expert number E, which does not exist.
    """
    demand(
        x.dim() == 2 and k <= x.shape[1],
        "npu_moe_gating_top_k_softmax",
        f"x must be [T, E] with E >= k = {k}, found {list(x.shape)}",
    )
    scores, experts = wide(x).softmax(-1).topk(k)
    if finished is not None:
        experts = experts.masked_fill(finished.view(-1, 1), x.shape[1])
    rows = torch.arange(experts.numel(), dtype=torch.int32).view(k, -1).T.contiguous()
    return scores.to(x.dtype), experts.to(torch.int32), rows


@torch_npu_op
@torch.no_grad()
def npu_moe_gating_top_k(
    x,
    k,
    *,
    bias=None,
    k_group=1,
    group_count=1,
    group_select_mode=0,
    renorm=0,
    norm_type=0,
    out_flag=False,
    routed_scaling_factor=1.0,
    eps=1e-20,
):
    """(weights of the chosen, their experts int32, all scores fp32 if out_flag), [T, k], [T, k], [T, E]. No gradient.

    norm_type 0 softmax, 1 sigmoid (then the weights are divided by their sum + eps); bias [E] is added for choosing
    only; of group_count groups the k_group best stay, by their best expert (group_select_mode 0) or the sum of their
    best two (1). renorm other than 0 is refused, as by the device.
    """
    op, E = "npu_moe_gating_top_k", x.shape[-1]
    demand(
        renorm == 0 and norm_type in (0, 1) and group_select_mode in (0, 1),
        op,
        f"renorm must be 0, norm_type and group_select_mode 0 or 1, found {renorm}, {norm_type}, {group_select_mode}",
    )
    demand(
        x.dim() == 2 and group_count > 0 and E % group_count == 0 and k_group <= group_count,
        op,
        f"x {list(x.shape)} must be [T, E], E a multiple of group_count {group_count} >= k_group {k_group}",
    )
    demand(bias is None or bias.shape == (E,), op, f"bias must be [{E}]")
    demand(k <= k_group * (E // group_count), op, f"k = {k} is more than {k_group} groups of {E // group_count} hold")
    scores = wide(x).softmax(-1) if norm_type == 0 else wide(x).sigmoid()
    choice = scores if bias is None else scores + wide(bias)
    if group_count > 1:
        groups = choice.view(-1, group_count, E // group_count)
        value = groups.amax(-1) if group_select_mode == 0 else groups.topk(min(2, groups.shape[-1])).values.sum(-1)
        kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, value.topk(k_group).indices, True)
        choice = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    experts = choice.topk(k).indices
    weights = scores.gather(1, experts)
    if norm_type == 1:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    out = scores if out_flag else scores.new_empty(0)
    return (weights * routed_scaling_factor).to(x.dtype), experts.to(torch.int32), out


@torch_npu_op
@torch.no_grad()
def npu_grouped_matmul(
    x,
    weight,
    *,
    bias=None,
    scale=None,
    offset=None,
    antiquant_scale=None,
    antiquant_offset=None,
    per_token_scale=None,
    group_list=None,
    activation_input=None,
    activation_quant_scale=None,
    activation_quant_offset=None,
    split_item=0,
    group_type=None,
    group_list_type=0,
    act_type=0,
    tuning_config=None,
    output_dtype=None,
):
    """Products of several experts at once, as a list: one output (split_item 2, 3) or one an input (0, 1).

    group_type 0: x [M, K] in groups of rows, weight [E, K, N] (or E matrices); 2: x [K, M] in groups of columns, weight
    [M, N], giving [E, K, N]; -1 or None: pair by pair. Like torch_npu's it has no gradient. No quantised products.
    """
    op = "npu_grouped_matmul"
    refused = {
        "scale": scale,
        "offset": offset,
        "antiquant_scale": antiquant_scale,
        "per_token_scale": per_token_scale,
        "antiquant_offset": antiquant_offset,
        "activation_input": activation_input,
        "activation_quant_scale": activation_quant_scale,
        "activation_quant_offset": activation_quant_offset,
    }
    found = [name for name, value in refused.items() if value]
    demand(
        not found and not act_type,
        op,
        f"quantised products and activations are not part of the reference; found {', '.join(found) or 'act_type'}",
    )
    biases = list(bias) if bias else [None] * len(weight)
    if group_type in (None, -1):
        demand(
            len(x) == len(weight) == len(biases), op, f"{len(x)} inputs for {len(weight)} weights, and no group_type"
        )
        made = [_product(op, a, b, c) for a, b, c in zip(x, weight, biases, strict=True)]
    else:
        matrices = weight[0] if len(weight) == 1 else torch.stack(list(weight))
        demand(len(x) == 1, op, f"{len(x)} inputs with group_type {group_type}, expected one")
        made = [grouped(op, x[0], matrices, biases[0], group_list, group_type, group_list_type or 0)]
    if split_item in (2, 3) and len(made) > 1:
        made = [torch.cat(made)]
    return [y if output_dtype is None else y.to(output_dtype) for y in made]


def _product(op, x, weight, bias):
    demand(x.dtype == weight.dtype, op, f"x is {x.dtype}, weight {weight.dtype}: they must be of one dtype")
    demand(
        x.shape[-1] == weight.shape[-2],
        op,
        f"x {list(x.shape)} and weight {list(weight.shape)}: K differs, {x.shape[-1]} and {weight.shape[-2]}",
    )
    y = wide(x) @ wide(weight)
    return (y if bias is None else y + wide(bias)).to(x.dtype)


def group_bounds(op, group_list, group_list_type: int, rows: int) -> list[tuple[int, int]]:
    """[first, last) row of each group; group_list is cumulative (type 0) or counts (type 1) and must cover all rows."""
    demand(group_list is not None, op, "group_list is missing")
    demand(group_list_type in (0, 1), op, f"group_list_type must be 0 or 1, found {group_list_type}")
    if isinstance(group_list, torch.Tensor):
        demand(
            group_list.dtype == torch.int64 and group_list.dim() == 1,
            op,
            f"group_list must be a list of int64, found {group_list.dtype} of shape {list(group_list.shape)}",
        )
        group_list = group_list.tolist()
    ends = list(group_list)
    if group_list_type == 1:
        ends = torch.tensor(ends, dtype=torch.int64).cumsum(0).tolist()
    bounds = list(pairwise([0, *ends]))
    demand(all(first <= last for first, last in bounds), op, f"group_list must not fall, found ends {ends}")
    demand(
        ends and ends[-1] == rows,
        op,
        f"group_list covers {ends[-1] if ends else 0} rows of {rows}; a device leaves the others unwritten"
        + (" (were counts given as cumulative ends?)" if group_list_type == 0 else ""),
    )
    return bounds


def grouped(op, x, weight, bias, group_list, group_type, group_list_type):
    """One product a group of rows (group_type 0) or of columns of x and rows of weight (group_type 2)."""
    demand(group_type in (0, 2), op, f"group_type must be 0 or 2, found {group_type}")
    demand(x.dtype == weight.dtype, op, f"x is {x.dtype}, weight {weight.dtype}: they must be of one dtype")
    demand(x.dim() == 2, op, f"x must have 2 dimensions, found {list(x.shape)}")
    if group_type == 2:
        bounds = group_bounds(op, group_list, group_list_type, x.shape[1])
        demand(
            weight.dim() == 2 and len(weight) == x.shape[1],
            op,
            f"x {list(x.shape)} and weight {list(weight.shape)}: M differs, {x.shape[1]} and {len(weight)}",
        )
        return torch.stack([_product(op, x[:, a:b], weight[a:b], None) for a, b in bounds])
    bounds = group_bounds(op, group_list, group_list_type, len(x))
    demand(
        weight.dim() == 3 and len(weight) == len(bounds),
        op,
        f"{len(bounds)} groups need weight [{len(bounds)}, K, N], found {list(weight.shape)}",
    )
    demand(
        x.shape[1] == weight.shape[1],
        op,
        f"x {list(x.shape)} and weight {list(weight.shape)}: K differs, {x.shape[1]} and {weight.shape[1]}",
    )
    return torch.cat(
        [_product(op, x[a:b], weight[e], None if bias is None else bias[e]) for e, (a, b) in enumerate(bounds)]
    )
