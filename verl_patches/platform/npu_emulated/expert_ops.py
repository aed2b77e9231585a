"""Norms and routed experts of vllm-ascend: references of the functions that ops/fused_moe.py and ops/layernorm.py call.

T tokens, H hidden, k experts a token, E experts of this rank, M = T * k rows. What a device leaves unwritten is NaN.
"""

from __future__ import annotations

import torch

from verl_patches.platform.cpu.ascend import ops
from verl_patches.platform.npu.op_schemas import demand, torch_npu_op, wide
from verl_patches.platform.npu_emulated import hccl
from verl_patches.platform.npu_emulated.graph import no_values, with_shapes


@torch_npu_op
def npu_add_rms_norm(x1, x2, gamma, epsilon):
    """(norm of x1 + x2, reciprocal root in fp32, x1 + x2)."""
    total = x1 + x2
    normed, rstd = ops.npu_rms_norm(total, gamma, epsilon)
    return normed, rstd, total


def _product_shapes(x, weight, **given):
    return [x[0].new_empty(len(x[0]), weight[0].shape[-1])]


@torch_npu_op
@with_shapes(_product_shapes)
def npu_grouped_matmul(x, weight, group_list, group_type, group_list_type, **given):
    """As training's reference, with one input; rows that group_list does not cover are NaN.

    MC2 dispatches into room for the largest batch, whose unused rows are multiplied by no expert.
    """
    demand(len(x) == 1 and group_type == 0, f"{len(x)} inputs with group_type {group_type}, expected 1 and 0")
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
    """(rows of x [T, H] in the order of their experts [M, H], place of each row_idx, experts in order), int32 [M].

    row_idx [T, k] numbers the pairs choice by choice (choice * T + token); expert_idx [T, k] int32.
    """
    dtypes = row_idx.dtype, expert_idx.dtype
    demand(dtypes == (torch.int32, torch.int32), f"row_idx and expert_idx must be int32, found {dtypes}")
    demand(active_num >= len(x), f"active_num {active_num} is less than {len(x)} tokens: dropping is not done here")
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
    """Last row of each expert plus one, cumulative, int32 [num_expert]; experts beyond are of other ranks."""
    counts = torch.bincount(sorted_expert_for_source_row.long(), minlength=num_expert)[:num_expert]
    return counts.cumsum(0).to(torch.int32)


def _finalize_shapes(expanded_permuted_rows, scales, **given):
    return expanded_permuted_rows.new_empty(len(scales), expanded_permuted_rows.shape[1])


@torch_npu_op
@with_shapes(_finalize_shapes)
def npu_moe_finalize_routing(
    expanded_permuted_rows, skip1, skip2, bias, scales, expanded_src_to_dst_row, export_for_source_row, drop_pad_mode
):
    """Sum of each token's k rows times scales [T, k]: [T, H]; expanded_src_to_dst_row as npu_moe_init_routing gave."""
    demand(skip1 is None and skip2 is None and bias is None, "skip1, skip2 and bias are not part of the reference")
    tokens, k = scales.shape
    rows = expanded_permuted_rows[expanded_src_to_dst_row.long()].view(k, tokens, -1)
    return (wide(rows) * wide(scales).T.unsqueeze(-1)).sum(0).to(expanded_permuted_rows.dtype)


# -- MC2: tokens to the ranks of their experts and back, in one op each ------------------------------------------------


def _dispatched_rows(x, expert_ids, ep_world_size, moe_expert_num, global_bs):
    """Rows of the room for what a rank can be sent at most, and its experts."""
    local = moe_expert_num // ep_world_size
    return (global_bs or len(x) * ep_world_size) * min(local, expert_ids.shape[1]), local


def _dispatch_shapes(x, expert_ids, ep_world_size, moe_expert_num, global_bs, **given):
    rows, local = _dispatched_rows(x, expert_ids, ep_world_size, moe_expert_num, global_bs)
    places = x.new_empty(expert_ids.numel(), dtype=torch.int32)
    counts, received = x.new_empty(local, dtype=torch.int64), x.new_empty(ep_world_size, dtype=torch.int32)
    room, zero = x.new_empty(rows, x.shape[1]), x.new_empty(1, dtype=torch.int32)
    return room, no_values(x), places, counts, received, zero, no_values(x)


@torch_npu_op
@with_shapes(_dispatch_shapes)
def npu_moe_distribute_dispatch(
    x,
    expert_ids,
    group_ep,
    ep_world_size,
    ep_rank_id,
    moe_expert_num,
    quant_mode,
    global_bs,
    expert_token_nums_type,
    **unused,
):
    """Send x [T, H] to the ranks of expert_ids int32 [T, k]; group_ep is the name of an HCCL group.

    Gives (rows in the order of this rank's experts, empty, expand_idx, tokens of each expert int64, received from each
    rank int32, 0, empty). There is room for the largest batch (global_bs); what is not used of it is NaN. expand_idx
    [T * k] is opaque: npu_moe_distribute_combine takes it back.
    """
    demand(quant_mode == 0 and expert_token_nums_type == 1, "quantised tokens and cumulative counts are not done here")
    demand(expert_ids.dtype == torch.int32, f"expert_ids must be int32, found {expert_ids.dtype}")
    largest = global_bs or len(x) * ep_world_size
    demand(len(x) * ep_world_size <= largest, f"{len(x)} tokens on {ep_world_size} ranks, global_bs is {global_bs}")
    group = hccl.group_named(group_ep)
    found = group.rank(), group.size()
    demand(found == (ep_rank_id, ep_world_size), f"{group_ep} has (rank, size) {found}")
    k, (most, local) = expert_ids.shape[1], _dispatched_rows(x, expert_ids, ep_world_size, moe_expert_num, global_bs)
    experts, order = expert_ids.flatten().long().sort(stable=True)
    sent = torch.bincount(experts // local, minlength=ep_world_size).tolist()
    rows, received = hccl.exchange(x[order // k], sent, group)
    experts, _ = hccl.exchange(experts, sent, group)
    experts, by_expert = (experts % local).sort(stable=True)
    room = x.new_full((most, x.shape[1]), torch.nan)
    room[: len(rows)] = rows[by_expert]
    counts = torch.bincount(experts, minlength=local)
    group.dispatched = order, sent, received, by_expert
    zero = torch.zeros(1, dtype=torch.int32)
    places = order.to(torch.int32)
    return room, no_values(x), places, counts, torch.tensor(received, dtype=torch.int32), zero, no_values(x)


def _combine_shapes(expand_x, expert_ids, **given):
    return expand_x.new_empty(len(expert_ids), expand_x.shape[1])


@torch_npu_op
@with_shapes(_combine_shapes)
def npu_moe_distribute_combine(
    expand_x, expert_ids, expand_idx, ep_send_counts, expert_scales, group_ep, comm_quant_mode, **unused
):
    """The way back: the sum of each token's k rows times expert_scales (fp32 [T, k]), [T, H]."""
    demand(expert_scales.dtype == torch.float32, f"expert_scales must be float32, found {expert_scales.dtype}")
    demand(comm_quant_mode == 0, "quantised communication is not part of the reference")
    group = hccl.group_named(group_ep)
    order, sent, received, by_expert = group.dispatched
    demand(torch.equal(order.int(), expand_idx), "expand_idx is not that of the last dispatch of this group")
    demand(ep_send_counts.tolist() == received, f"ep_send_counts is {ep_send_counts.tolist()}, expected {received}")
    rows = torch.empty_like(expand_x[: len(by_expert)])
    rows[by_expert] = expand_x[: len(by_expert)]
    returned, back = hccl.exchange(rows, received, group)
    demand(back == sent, f"{back} rows came back, {sent} were sent")
    placed = torch.empty_like(returned)
    placed[order] = returned
    placed = placed.view(*expert_scales.shape, -1)
    return (wide(placed) * expert_scales.unsqueeze(-1)).sum(1).to(expand_x.dtype)
