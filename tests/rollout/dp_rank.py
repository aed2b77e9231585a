"""What the data-parallel tests run on each rank."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.emulation.emulated_engine import record, worker_of
from tests.rollout import engine_rank
from verl_patches.heartbeat import heartbeat
from verl_patches.heartbeat.node import read_processes


def generate(folder: str, rollout: dict, rounds: list[list[dict]]) -> dict:
    """Rounds of generation one after the other, and the place of this rank: groups and experts.

    `rounds[i][d]` is round i of DP rank d.
    """
    from vllm.distributed import get_dp_group, get_ep_group, get_tp_group

    llm = engine_rank.awake(folder, **rollout)
    model = engine_rank.model_of(llm)
    if rollout.get("load_format") == "dummy":  # as verl's sharding manager: every rank gets every tensor
        model.load_weights(engine_rank.hf_tensors(folder))
        llm.weights_written(last=False)
    worker = worker_of(llm)
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
    """One call of generate, perhaps without one feature; tokens, log-probs and forward passes, or an error."""
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


def unfinished(flags: list[list[bool]], folder: str) -> dict:
    """What each rank is told after it has said flags[i][rank], and how: vllm-ascend's group and tensor, vLLM's port.

    On platform npu_emulated, without an engine; a heartbeat in `folder` counts the group's operations.
    """
    from types import SimpleNamespace

    from torch.overrides import TorchFunctionMode
    from vllm.config import ParallelConfig
    from vllm_ascend.platform import NPUPlatform
    from vllm_ascend.utils import adapt_patch

    from verl_patches.rollout.engine import _group_address

    adapt_patch(is_global_patch=True)
    rank, size, backends, devices = torch.distributed.get_rank(), torch.distributed.get_world_size(), [], set()
    make = NPUPlatform.stateless_init_device_torch_dist_pg

    def note(backend: str, **given):
        backends.append(backend)
        return make(backend=backend, **given)

    class Devices(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.tensor:
                devices.add(str((kwargs or {}).get("device")))
            return func(*args, **(kwargs or {}))

    NPUPlatform.stateless_init_device_torch_dist_pg = staticmethod(note)  # vLLM calls it on an instance
    ip, port = _group_address(0, rank)
    config = SimpleNamespace(data_parallel_rank=rank, data_parallel_size=size, data_parallel_master_ip=ip)
    config.data_parallel_master_port = port
    config.get_next_dp_init_port = lambda: ParallelConfig.get_next_dp_init_port(config)
    group = ParallelConfig.stateless_init_dp_group(config)
    heartbeat.here().start(Path(folder), f"rank {rank}", rank)
    heartbeat.here().count_group(group, "vLLM's dp", range(size))
    with Devices():
        told = [ParallelConfig.has_unfinished_dp(group, said[rank]) for said in flags]
    heartbeat.here().beat()
    counted = next(seen for seen in read_processes(Path(folder)) if seen.beat.rank == rank).beat.groups
    heartbeat.here().stop()
    return {
        "told": told,
        "counted": counted,
        "backends": backends,
        "devices": sorted(devices),
        "ports": config.data_parallel_master_port - port,
    }
