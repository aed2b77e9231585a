"""MC2 on one rank: dispatch and combine alone, against a plain dense computation; and engines that decode by it."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.emulation.npu import expert_ops, hccl

HIDDEN, EXPERTS, K, MOST = 6, 8, 3, 5  # MOST: tokens of a rank at most


def inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of one rank (fewer on later ranks), their experts and scales, and the weights of all experts."""
    generator = torch.Generator().manual_seed(rank)
    tokens = MOST - rank
    x = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(K).indices.to(torch.int32)
    scales = torch.rand(tokens, K, generator=generator)
    weight = torch.randn(EXPERTS, HIDDEN, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(99))
    return x, ids, scales, weight


def routed(group: Any, shift: int = 0) -> dict[str, Any]:
    """Dispatch, one product an expert, combine; the largest difference to the dense computation, and what was used.

    shift: experts compute with the weights of another.
    """
    rank, size = group.rank(), group.size()
    x, ids, scales, weight = inputs(rank)
    both = {"expert_ids": ids, "group_ep": group.get_hccl_comm_name(rank), "ep_world_size": size, "ep_rank_id": rank}
    both |= {"moe_expert_num": EXPERTS, "global_bs": MOST * size, "tp_world_size": 1, "group_tp": group.name}
    sent = expert_ops.npu_moe_distribute_dispatch(x=x, **both)
    rows, _, expand_idx, counts, received, zero, _ = sent
    local, used = EXPERTS // size, int(counts.sum())
    own = weight.roll(shift, 0)[rank * local : (rank + 1) * local]
    groups = {"group_list": counts, "group_type": 0, "group_list_type": 1, "split_item": 2}
    (made,) = expert_ops.npu_grouped_matmul(x=[rows], weight=[own], **groups)
    both |= {"expand_idx": expand_idx, "ep_send_counts": received, "tp_send_counts": zero, "expand_x": made}
    found = expert_ops.npu_moe_distribute_combine(expert_scales=scales, **both)
    chosen = torch.einsum("tkoh,th->tko", weight.transpose(1, 2)[ids.long()], x)
    expected = (chosen * scales.double().unsqueeze(-1)).sum(1)
    nan = bool(rows[used:].isnan().all()) and not bool(rows[:used].isnan().any())
    return {"worst": float((found - expected).abs().max()), "rows": len(rows), "used": used, "rest is NaN": nan}


def on_rank(case: str, shift: int = 0) -> dict[str, Any]:
    """`routed` among all ranks in a group of their own."""
    store = dist.PrefixStore(f"mc2 {case}", dist.distributed_c10d._get_default_store())
    return routed(hccl.create(store, dist.get_rank(), dist.get_world_size(), dist.default_pg_timeout), shift)


GRAPHS = {"torchair_graph_config": {"enabled": True, "graph_batch_sizes": [8]}, "chunked_prefill_for_mla": True}


def engines(model: str, dp: int, tp: int, cases: list[dict]) -> list[dict[str, Any]]:
    """Emulated engines of DP x TP ranks one after the other, each with vLLM's groups made anew.

    A case has `graphs`, whether decode is compiled, and `without`, rows in whose places upstream's objects are. The
    answer of each: ranks, name and options of the EP group's communicator and, of an engine that decodes, what
    `compare` gives, those of MC2's, how MC2 has used it, and whether it outlives vLLM's groups; else the error.
    """
    from vllm.distributed import parallel_state

    from tests.emulation.emulated_engine import compare, reference_of
    from tests.rollout.ascend_engine import without
    from tests.rollout.rebalance_rank import build
    from verl_patches.platform.npu.groups import small_groups_mib

    small_groups_mib.value = 64
    reference, found = reference_of(model), []
    for case in cases:
        options, answer, mc2 = {"refresh": True, **(GRAPHS if case["graphs"] else {})}, {}, None
        with without(case["without"]):
            try:
                llm = build(model, dp, tp, additional_config=options, enforce_eager=not case["graphs"])
                mc2 = _communicator_of_mc2(llm)
                answer = {**compare(llm, reference), "mc2": _facts(mc2), "in graphs": mc2.mc2_in_graphs}
            except ValueError as error:
                answer["error"] = str(error)
        ep = parallel_state.get_ep_group().device_group._get_backend(torch.device("npu"))
        llm = None
        gc.collect()
        torch._dynamo.reset()
        parallel_state.destroy_model_parallel()
        left = [group._get_backend(torch.device("cpu")) for group in dist.distributed_c10d._world.pg_map]
        found.append(answer | {"ep": _facts(ep), "left": mc2 in left})
    return found


def _facts(group: hccl.ProcessGroupHCCL) -> list[Any]:
    return [group.ranks, group.name, group.config.get("hccl_buffer_size")]


def _communicator_of_mc2(llm: Any) -> Any:
    from vllm_ascend.ops.fused_moe import AscendFusedMoE

    from tests.emulation.emulated_engine import model_of

    layer = next(each for each in model_of(llm).modules() if isinstance(each, AscendFusedMoE))
    return hccl._GROUPS[layer.quant_method.moe_all_to_all_group_name]
