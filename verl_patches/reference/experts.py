"""Route tokens to experts and multiply by their matrices, as torch_npu's operators and MindSpeed's op builders do.

Letters of shapes: T tokens, H hidden, k experts a token, E experts, M rows in all, K and N the sides of one expert's
matrix.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from verl_patches.reference import demand, demand_int32, demand_one_dtype, to_fp32


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


@torch.no_grad()
def npu_grouped_matmul(x, weight, group_list, split_item, group_type, group_list_type):
    """Multiply x [M, K] by weight [E, K, N], group of rows by group: one input, weight and output; no gradient.

    Rows after those that group_list covers become NaN: MC2 dispatches into a buffer for the largest batch, whose unused
    rows belong to no expert.
    """
    found = f"{len(x)} inputs, {len(weight)} weights, group_type {group_type}, split_item {split_item}"
    demand(
        len(x) == len(weight) == 1 and group_type == 0 and split_item in (2, 3),
        f"expected 1 input, 1 weight, group_type 0 and split_item 2 or 3, found {found}",
    )
    kind = group_list_type or 0
    covered = int(group_list[-1] if kind == 0 else sum(group_list))
    made = grouped_matmul(x[0][:covered], weight[0], group_list, 0, kind)
    return [torch.cat((made, made.new_full((len(x[0]) - covered, made.shape[1]), torch.nan)))]


def npu_moe_init_routing(x, row_idx, expert_idx, active_num):
    """Return (rows of x [T, H] sorted by expert [M, H], place of each row_idx, sorted experts), the last two int32 [M].

    row_idx [T, k] numbers the pairs choice by choice (choice * T + token); expert_idx [T, k] is int32.
    """
    demand_int32(row_idx=row_idx, expert_idx=expert_idx)
    fits = row_idx.shape == expert_idx.shape and len(expert_idx) == len(x)
    shapes = f"row_idx {list(row_idx.shape)}, expert_idx {list(expert_idx.shape)}"
    demand(fits, f"{shapes} must be [{len(x)}, k] for {len(x)} tokens")
    demand(active_num >= len(x), f"active_num must be at least {len(x)}, the number of tokens, found {active_num}")
    experts, order = expert_idx.flatten().sort(stable=True)
    source = row_idx.flatten()[order].long()
    places = torch.empty_like(source)
    places[source] = torch.arange(len(source))
    return x[source % len(x)], places.to(torch.int32), experts


def npu_moe_compute_expert_tokens(sorted_expert_for_source_row, num_expert):
    """Return each expert's last row plus one, cumulative, int32 [num_expert]; higher experts are on other ranks.

    The experts (int32) must be sorted: a device finds the last row of each by bisection.
    """
    experts = sorted_expert_for_source_row
    demand_int32(sorted_expert_for_source_row=experts)
    falls = bool((experts[1:] < experts[:-1]).any())
    demand(not falls, "sorted_expert_for_source_row must not decrease; sort the experts first")
    counts = torch.bincount(sorted_expert_for_source_row.long(), minlength=num_expert)[:num_expert]
    return counts.cumsum(0).to(torch.int32)


def npu_moe_finalize_routing(
    expanded_permuted_rows, scales, expanded_src_to_dst_row, export_for_source_row, drop_pad_mode
):
    """Return the sum of each token's k rows times scales [T, k]: [T, H].

    expanded_src_to_dst_row holds the places that npu_moe_init_routing returned.
    """
    demand(drop_pad_mode in (None, 0), f"drop_pad_mode must be 0, found {drop_pad_mode}")
    demand(scales is not None, "scales must be given, found None")
    demand_one_dtype(expanded_permuted_rows=expanded_permuted_rows, scales=scales)
    places = expanded_src_to_dst_row
    demand_int32(expanded_src_to_dst_row=places, export_for_source_row=export_for_source_row)
    tokens, k = scales.shape
    rows = [len(places), len(expanded_permuted_rows)]
    demand(rows == [tokens * k] * 2, f"scales {list(scales.shape)} need {tokens * k} places and rows, found {rows}")
    rows = expanded_permuted_rows[places.long()].view(k, tokens, -1)
    return (to_fp32(rows) * to_fp32(scales).T.unsqueeze(-1)).sum(0).to(expanded_permuted_rows.dtype)


def sum_over_experts(x, expert_ids, scales, expert):
    """Return for each token x[t] [T, H] the sum of scales[t, j] * expert(e, x[t]) over its experts e, [T, H].

    expert_ids and scales are [T, k]; expert(e, row [H]) returns [H]. A plain loop over all pairs: what MC2's dispatch,
    the experts of all ranks and MC2's combine make together.
    """
    total = torch.zeros_like(to_fp32(x))
    for token, (chosen, weights) in enumerate(zip(expert_ids.tolist(), scales.tolist(), strict=True)):
        for number, weight in zip(chosen, weights, strict=True):
            total[token] += weight * expert(number, to_fp32(x[token]))
    return total.to(x.dtype)
