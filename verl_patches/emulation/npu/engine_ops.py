"""Bind the rollout engine's operators to their references, and emulate MC2 on gloo.

MC2 dispatches tokens to the ranks of their experts and combines the results. Letters of shapes: T tokens, H hidden,
k experts a token. Memory that a device leaves unwritten is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from verl_patches.emulation.npu import hccl
from verl_patches.emulation.op_schemas import ATB_FUNCTIONS, ENGINE_FUNCTIONS, atb_op, torch_npu_op, with_shapes
from verl_patches.reference import demand, demand_int32, empty_output, experts, layers, paged_mla, to_fp32


def _product_shapes(x, weight, **given):
    return [x[0].new_empty(len(x[0]), weight[0].shape[-1])]


def _routing_shapes(x, row_idx, expert_idx, active_num):
    count = expert_idx.numel()
    return x.new_empty(count, x.shape[1]), *(x.new_empty(count, dtype=torch.int32) for _ in range(2))


def _count_shapes(sorted_expert_for_source_row, num_expert):
    return sorted_expert_for_source_row.new_empty(num_expert)


def _finalize_shapes(expanded_permuted_rows, scales, **given):
    return expanded_permuted_rows.new_empty(len(scales), expanded_permuted_rows.shape[1])


def _cache_shapes(kv, gamma, k_cache, ckv_cache, is_output_kv, **given):
    if not is_output_kv:
        return k_cache, ckv_cache, empty_output(kv), empty_output(kv)
    latent = gamma.shape[0]
    return k_cache, ckv_cache, torch.empty_like(kv[..., latent:]), torch.empty_like(kv[..., :latent])


def _decode_shapes(query, **given):
    return torch.empty_like(query), empty_output(query, torch.float32)


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
):
    """Send x [T, H] to the ranks of expert_ids int32 [T, k]; group_ep is the name of an HCCL group.

    Returns (rows in the order of this rank's experts, empty, expand_idx, tokens of each expert int64, ep_recv_counts
    int32, 0, empty). The rows are a buffer for the largest batch (global_bs, equal on all ranks; 0: all ranks have T
    tokens), NaN where unused. expand_idx [T * k] and ep_recv_counts are opaque: npu_moe_distribute_combine takes them
    back; a device's layout of the two is not reproduced.
    """
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
    chosen, order = expert_ids.flatten().long().sort(stable=True)
    sent = torch.bincount(chosen // local, minlength=ep_world_size).tolist()
    rows, received = hccl.exchange_rows(x[order // k], sent, group, ("global_bs (0: T * ep_world_size)", largest))
    chosen, _ = hccl.exchange_rows(chosen, sent, group)
    chosen, by_expert = (chosen % local).sort(stable=True)
    buffer = x.new_full((most, x.shape[1]), torch.nan)
    buffer[: len(rows)] = rows[by_expert]
    counts = torch.bincount(chosen, minlength=local)
    arguments = {"ep_world_size": ep_world_size, "ep_rank_id": ep_rank_id, "moe_expert_num": moe_expert_num}
    arguments["global_bs"] = global_bs
    group.last_dispatch = Dispatch(expert_ids.clone(), arguments, x.dtype, order, sent, received, by_expert)
    zero = torch.zeros(1, dtype=torch.int32)
    places = order.to(torch.int32)
    return buffer, empty_output(x), places, counts, torch.tensor(received, dtype=torch.int32), zero, empty_output(x)


def _combine_shapes(expand_x, expert_ids, **given):
    return expand_x.new_empty(len(expert_ids), expand_x.shape[1])


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
):
    """Return rows to their tokens' ranks and sum each token's k rows times expert_scales (fp32 [T, k]): [T, H].

    ep_send_counts and expand_idx are those of the group's last dispatch, whose other arguments must be the same.
    """
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


# -- the operators as vllm-ascend calls them ---------------------------------------------------------------------------

_MC2 = {each.__name__: each for each in (npu_moe_distribute_dispatch, npu_moe_distribute_combine)}
_REFERENCES = {**vars(experts), **vars(layers), **vars(paged_mla), **_MC2}
_SHAPES: dict[str, Callable] = {
    "npu_fused_infer_attention_score": _decode_shapes,
    "npu_grouped_matmul": _product_shapes,
    "npu_kv_rmsnorm_rope_cache": _cache_shapes,
    "npu_moe_compute_expert_tokens": _count_shapes,
    "npu_moe_distribute_combine": _combine_shapes,
    "npu_moe_distribute_dispatch": _dispatch_shapes,
    "npu_moe_finalize_routing": _finalize_shapes,
    "npu_moe_init_routing": _routing_shapes,
}


def _bind(name: str) -> Callable:
    reference = _REFERENCES[name]
    return torch_npu_op(with_shapes(_SHAPES[name])(reference) if name in _SHAPES else reference)


OPERATORS: dict[str, Callable] = {name: _bind(name) for name in ["npu_grouped_matmul", *ENGINE_FUNCTIONS]}
OPERATORS |= {name: atb_op(_REFERENCES[name]) for name in ATB_FUNCTIONS}
