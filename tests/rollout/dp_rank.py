"""Run the data-parallel tests' generation on a rank."""

from __future__ import annotations

import torch

from tests.emulation.emulated_engine import engine_worker, record
from tests.rollout import engine_rank


def generate(folder: str, rollout: dict, rounds: list[list[dict]]) -> dict:
    """Generate round after round; return the results and this rank's groups and experts.

    `rounds[i][d]` is round i of DP rank d.
    """
    from vllm.distributed import get_dp_group, get_ep_group, get_tp_group

    llm = engine_rank.awake(folder, **rollout)
    model = engine_rank.engine_model(llm)
    if rollout.get("load_format") == "dummy":  # as verl's sharding manager: every rank gets every tensor
        model.load_weights(engine_rank.hf_tensors(folder))
        llm.mark_weights_written(last=False)
    worker = engine_worker(llm)
    passes = {  # all forward passes of this rank, and those for sequences of its own
        name: record(holder, "execute_model", lambda *args, **kwargs: None)
        for name, holder in (("all", worker.model_runner), ("own", worker))
    }
    groups = {"dp": get_dp_group().ranks, "tp": get_tp_group().ranks, "ep": get_ep_group().ranks}
    expert_map = model.model.layers[1].mlp.experts.expert_map
    place = torch.distributed.get_rank() // rollout["tensor_model_parallel_size"]
    results = [_round(llm, specs[place], passes) for specs in rounds]
    return {"rounds": results, "groups": groups, "experts": torch.nonzero(expert_map >= 0).flatten().tolist()}


def _round(llm, spec: dict, passes: dict[str, list]) -> dict:
    """Call generate once, perhaps without one feature; return tokens, log-probs and forward passes, or an error."""
    from vllm import LLM
    from vllm.distributed import get_ep_group

    from verl_patches.emulation.cpu import vllm_worker

    for calls in passes.values():
        calls.clear()
    communicator, run_engine = get_ep_group().device_communicator, LLM._run_engine
    manager = communicator.all2all_manager
    vllm_worker.STALL_S = spec.get("stall_s", 60)
    try:
        if spec.get("without") == "exchange":
            communicator.all2all_manager = None
        if spec.get("without") == "platform.vllm_dp_lockstep":
            LLM._run_engine = run_engine.__wrapped__
        return {
            **engine_rank.generate_with(llm, spec["requests"]),
            "passes": {name: len(calls) for name, calls in passes.items()},
        }
    except RuntimeError as error:
        return {"error": str(error)}
    finally:
        communicator.all2all_manager, LLM._run_engine = manager, run_engine
