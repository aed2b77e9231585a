"""Run engines that decode by MC2 on a rank."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist

from verl_patches.emulation.npu import hccl

GRAPHS = {"torchair_graph_config": {"enabled": True, "graph_batch_sizes": [8]}, "chunked_prefill_for_mla": True}


def engines(model: str, dp: int, tp: int, cases: list[dict]) -> list[dict[str, Any]]:
    """Run emulated engines of DP x TP ranks one after the other, each with new groups of vLLM.

    A case has `graphs`, whether decode is compiled, and `without`, patches replaced by upstream's objects. The result
    of each has ranks, name and options of the EP group's communicator and, if the engine decodes, the result of
    `compare`, those facts of MC2's group, how MC2 has used it, and whether it outlives vLLM's groups; else the error.
    """
    from vllm.distributed import parallel_state

    from tests.emulation.emulated_engine import compare, reference_responses, without
    from tests.rollout.dp_sync_rank import build
    from verl_patches.platform.npu.groups import small_groups_mib

    small_groups_mib.value = 64
    reference, found = reference_responses(model), []
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


def cut_experts(model: str, cases: dict[str, dict]) -> dict[str, Any]:
    """Return the result of `compare` of graphs with these options, with experts cut over all ranks (TP)."""
    from vllm.distributed import parallel_state

    from tests.emulation.emulated_engine import compare, reference_responses
    from tests.rollout.dp_sync_rank import build

    reference, found = reference_responses(model), {}
    for name, options in cases.items():
        graphs = {**GRAPHS["torchair_graph_config"], **options}
        config = {"refresh": True, **GRAPHS, "torchair_graph_config": graphs}
        llm = build(model, 1, dist.get_world_size(), additional_config=config, enable_expert_parallel=False)
        found[name] = compare(llm, reference)
        llm = None
        gc.collect()
        torch._dynamo.reset()
        parallel_state.destroy_model_parallel()
    return found


def _facts(group: hccl.ProcessGroupHCCL) -> list[Any]:
    return [group.ranks, group.name, group.config.get("hccl_buffer_size")]


def _communicator_of_mc2(llm: Any) -> Any:
    from vllm_ascend.ops.fused_moe import AscendFusedMoE

    from tests.emulation.emulated_engine import engine_model

    layer = next(each for each in engine_model(llm).modules() if isinstance(each, AscendFusedMoE))
    return hccl._GROUPS[layer.quant_method.moe_all_to_all_group_name]
