"""Implement norms and routed experts in plain torch, for vllm_ascend.ops.fused_moe and vllm_ascend.ops.layernorm.

Letters of shapes: T tokens, H hidden, k experts a token, E experts of this rank, M = T * k rows. Memory that a device
leaves unwritten is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from verl_patches.emulation.ascend import ops
from verl_patches.emulation.npu import hccl
from verl_patches.emulation.op_schemas import (
    demand,
    demand_defaults,
    demand_int32,
    demand_one_dtype,
    empty_output,
    to_fp32,
    torch_npu_op,
    with_shapes,
)


@torch_npu_op
def npu_add_rms_norm(x1, x2, gamma, epsilon):
    """Return (RMS norm of x1 + x2, reciprocal root in fp32, x1 + x2)."""
    demand_one_dtype(x1=x1, x2=x2, gamma=gamma)
    demand(x1.shape == x2.shape, f"x1 {list(x1.shape)} and x2 {list(x2.shape)} must be of one shape")
    total = x1 + x2
    normed, rstd = ops.npu_rms_norm(total, gamma, epsilon)
    return normed, rstd, total


def _product_shapes(x, weight, **given):
    return [x[0].new_empty(len(x[0]), weight[0].shape[-1])]


@torch_npu_op
@with_shapes(_product_shapes)
def npu_grouped_matmul(x, weight, group_list, group_type, group_list_type, **given):
    """Multiply as training's reference does, with one input; rows that group_list does not cover become NaN.

    MC2 dispatches into a buffer for the largest batch; its unused rows belong to no expert.
    """
    demand(len(x) == 1 and group_type == 0, f"expected 1 input and group_type 0, found {len(x)} and {group_type}")
    last = group_list[-1] if group_list_type == 0 else group_list.sum()
    rows, covered = x[0], int(last)
    options = {"group_list": group_list, "group_type": group_type, "group_list_type": group_list_type, **given}
    made = ops.npu_grouped_matmul([rows[:covered]], weight, **options)[0]
    return [torch.cat((made, made.new_full((len(rows) - covered, made.shape[1]), torch.nan)))]


def _routing_shapes(x, row_idx, expert_idx, active_num):
    count = expert_idx.numel()
    return x.new_empty(count, x.shape[1]), *(x.new_empty(count, dtype=torch.int32) for _ in range(2))


@torch_npu_op
@with_shapes(_routing_shapes)
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


def _count_shapes(sorted_expert_for_source_row, num_expert):
    return sorted_expert_for_source_row.new_empty(num_expert)


@torch_npu_op
@with_shapes(_count_shapes)
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


def _finalize_shapes(expanded_permuted_rows, scales, **given):
    return expanded_permuted_rows.new_empty(len(scales), expanded_permuted_rows.shape[1])


@torch_npu_op
@with_shapes(_finalize_shapes)
def npu_moe_finalize_routing(
    expanded_permuted_rows, skip1, skip2, bias, scales, expanded_src_to_dst_row, export_for_source_row, drop_pad_mode
):
    """Return the sum of each token's k rows times scales [T, k]: [T, H].

    expanded_src_to_dst_row holds the places that npu_moe_init_routing returned.
    """
    demand_defaults("npu_moe_finalize_routing", {"skip1": skip1, "skip2": skip2, "bias": bias})
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


# -- MC2: tokens to the ranks of their experts and back, in one op each ------------------------------------------------


@dataclass(frozen=True)
class Dispatch:
    """Hold one MC2 dispatch for the combine of the same group: the arguments that both must have, and what was sent."""

    expert_ids: torch.Tensor
    arguments: dict[str, int]
    dtype: torch.dtype
    order: torch.Tensor  # argsort of the pairs (token, expert) by expert
    sent: list[int]
    received: list[int]
    by_expert: torch.Tensor  # argsort of the received rows by expert


def _dispatched_rows(x, expert_ids, ep_world_size, moe_expert_num, global_bs):
    """Return the largest number of tokens of all ranks, the most rows a rank can receive, and its number of experts."""
    local, largest = moe_expert_num // ep_world_size, global_bs or len(x) * ep_world_size
    return largest, largest * min(local, expert_ids.shape[1]), local


def _dispatch_shapes(x, expert_ids, ep_world_size, moe_expert_num, global_bs, **given):
    _, rows, local = _dispatched_rows(x, expert_ids, ep_world_size, moe_expert_num, global_bs)
    places = x.new_empty(expert_ids.numel(), dtype=torch.int32)
    counts, received = x.new_empty(local, dtype=torch.int64), x.new_empty(ep_world_size, dtype=torch.int32)
    buffer, zero = x.new_empty(rows, x.shape[1]), x.new_empty(1, dtype=torch.int32)
    return buffer, empty_output(x), places, counts, received, zero, empty_output(x)


@torch_npu_op
@with_shapes(_dispatch_shapes)
def npu_moe_distribute_dispatch(
    x,
    expert_ids,
    group_ep,
    ep_world_size,
    ep_rank_id,
    moe_expert_num,
    group_tp,
    tp_world_size,
    quant_mode,
    global_bs,
    expert_token_nums_type,
    **unused,
):
    """Send x [T, H] to the ranks of expert_ids int32 [T, k]; group_ep is the name of an HCCL group.

    Returns (rows in the order of this rank's experts, empty, expand_idx, tokens of each expert int64, ep_recv_counts
    int32, 0, empty). The rows are a buffer for the largest batch (global_bs, equal on all ranks; 0: all ranks have T
    tokens), NaN where unused. expand_idx [T * k] and ep_recv_counts are opaque: npu_moe_distribute_combine takes them
    back; a device's layout of the two is not reproduced.
    """
    demand_defaults("npu_moe_distribute_dispatch", unused)
    demand(tp_world_size in (0, 1), f"tp_world_size must be 0 or 1 (group_tp is not supported), found {tp_world_size}")
    modes = quant_mode, expert_token_nums_type
    demand(modes == (0, 1), f"(quant_mode, expert_token_nums_type) must be (0, 1), found {modes}")
    demand_int32(expert_ids=expert_ids)
    demand(len(expert_ids) == len(x), f"expert_ids must have {len(x)} rows, one a token, found {len(expert_ids)}")
    demand(moe_expert_num % ep_world_size == 0, f"{moe_expert_num} experts must be a multiple of {ep_world_size} ranks")
    demand(global_bs % ep_world_size == 0, f"global_bs {global_bs} must be a multiple of {ep_world_size} ranks")
    known = bool(((expert_ids >= 0) & (expert_ids < moe_expert_num)).all())
    demand(known, f"expert_ids must be 0 to {moe_expert_num - 1}")
    k, sizes = expert_ids.shape[1], (x, expert_ids, ep_world_size, moe_expert_num, global_bs)
    largest, most, local = _dispatched_rows(*sizes)
    demand(len(x) * ep_world_size <= largest, f"global_bs {global_bs} is below {len(x)} tokens * {ep_world_size} ranks")
    group = hccl.mc2_group(group_ep)
    found = group.rank(), group.size()
    expected = ep_rank_id, ep_world_size
    demand(found == expected, f"group {group_ep} must have (rank, size) {expected}, found {found}")
    experts, order = expert_ids.flatten().long().sort(stable=True)
    sent = torch.bincount(experts // local, minlength=ep_world_size).tolist()
    rows, received = hccl.exchange_rows(x[order // k], sent, group, ("global_bs (0: T * ep_world_size)", largest))
    experts, _ = hccl.exchange_rows(experts, sent, group)
    experts, by_expert = (experts % local).sort(stable=True)
    buffer = x.new_full((most, x.shape[1]), torch.nan)
    buffer[: len(rows)] = rows[by_expert]
    counts = torch.bincount(experts, minlength=local)
    arguments = {"ep_world_size": ep_world_size, "ep_rank_id": ep_rank_id, "moe_expert_num": moe_expert_num}
    arguments["global_bs"] = global_bs
    group.last_dispatch = Dispatch(expert_ids.clone(), arguments, x.dtype, order, sent, received, by_expert)
    zero = torch.zeros(1, dtype=torch.int32)
    places = order.to(torch.int32)
    return buffer, empty_output(x), places, counts, torch.tensor(received, dtype=torch.int32), zero, empty_output(x)


def _combine_shapes(expand_x, expert_ids, **given):
    return expand_x.new_empty(len(expert_ids), expand_x.shape[1])


@torch_npu_op
@with_shapes(_combine_shapes)
def npu_moe_distribute_combine(
    expand_x,
    expert_ids,
    expand_idx,
    ep_send_counts,
    expert_scales,
    group_ep,
    ep_world_size,
    ep_rank_id,
    moe_expert_num,
    tp_send_counts,
    group_tp,
    tp_world_size,
    global_bs,
    **unused,
):
    """Return rows to their tokens' ranks and sum each token's k rows times expert_scales (fp32 [T, k]): [T, H].

    ep_send_counts and expand_idx are those of the group's last dispatch, whose other arguments must be the same.
    """
    demand_defaults("npu_moe_distribute_combine", unused)
    demand(tp_world_size in (0, 1), f"tp_world_size must be 0 or 1 (group_tp is not supported), found {tp_world_size}")
    demand(
        tp_send_counts is None or not bool(tp_send_counts.any()),
        "tp_send_counts must be 0, as npu_moe_distribute_dispatch gave",
    )
    demand(expert_scales.dtype == torch.float32, f"expert_scales must be float32, found {expert_scales.dtype}")
    shapes = f"expert_scales {list(expert_scales.shape)} and expert_ids {list(expert_ids.shape)}"
    demand(expert_scales.shape == expert_ids.shape, f"{shapes} must be of one shape")
    group = hccl.mc2_group(group_ep)
    dispatch = group.last_dispatch
    demand(dispatch is not None, f"group {group_ep} has no dispatch to combine; call npu_moe_distribute_dispatch first")
    found = {"ep_world_size": ep_world_size, "ep_rank_id": ep_rank_id, "moe_expert_num": moe_expert_num}
    found["global_bs"] = global_bs
    demand(found == dispatch.arguments, f"arguments must be the dispatch's, {dispatch.arguments}, found {found}")
    demand(torch.equal(dispatch.expert_ids, expert_ids), "expert_ids must be those of the group's last dispatch")
    demand(expand_x.dtype == dispatch.dtype, f"expand_x must be {dispatch.dtype}, found {expand_x.dtype}")
    order, sent, received, by_expert = dispatch.order, dispatch.sent, dispatch.received, dispatch.by_expert
    demand(torch.equal(order.int(), expand_idx), "expand_idx must be that of the group's last dispatch")
    demand(ep_send_counts.tolist() == received, f"ep_send_counts must be {received}, found {ep_send_counts.tolist()}")
    rows = torch.empty_like(expand_x[: len(by_expert)])
    rows[by_expert] = expand_x[: len(by_expert)]
    returned, back = hccl.exchange_rows(rows, received, group)
    demand(back == sent, f"expected {sent} rows back from the ranks, found {back}")
    placed = torch.empty_like(returned)
    placed[order] = returned
    placed = placed.view(*expert_scales.shape, -1)
    return (to_fp32(placed) * expert_scales.unsqueeze(-1)).sum(1).to(expand_x.dtype)
