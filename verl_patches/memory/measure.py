"""Measure the bytes that Megatron's and vLLM's objects hold on the device now; imports torch, so for workers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from verl_patches.memory.host_backed import single_optimizers

MOMENTS = ("exp_avg", "exp_avg_sq")


def held_bytes(tensors: Iterable[Any], device_type: str) -> int:
    """Return the bytes of the distinct storages of `tensors` (may be nested lists and tuples) on `device_type`.

    A storage that was resized to 0 holds nothing.
    """
    storages = {}
    for tensor in tensors_in(tensors):
        if tensor.device.type == device_type:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def tensors_in(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Return every tensor of nested lists and tuples, in order, without None."""
    return (tensor for tensor in tree_leaves(list(tensors)) if tensor is not None)


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of a distributed optimizer: fp32 main parameters of 16-bit ones, and Adam's moments so far.

    fp32 parameters have no main copy: their shards are views of the parameters.
    """
    for single in single_optimizers(optimizer):
        yield from tensors_in(single.shard_fp32_from_float16_groups)
        for state in single.optimizer.state.values():
            yield from (state[name] for name in MOMENTS if name in state)


def optimizer_full_bytes(optimizer: Any) -> int:
    """Return the bytes of `optimizer_tensors` once Adam has made its moments."""
    total = 0
    for single in single_optimizers(optimizer):
        main = sum(tensor.numel() for tensor in tensors_in(single.shard_fp32_from_float16_groups))
        own = sum(tensor.numel() for tensor in tensors_in(single.shard_fp32_groups))
        total += 4 * (len(MOMENTS) * (main + own) + main)
    return total


def vllm_worker(engine: Any) -> Any:
    """Return the worker of an in-process LLM, as verl reaches it (verl/workers/sharding_manager/megatron_vllm.py)."""
    return engine.llm_engine.model_executor.driver_worker.worker


def kv_caches(engine: Any) -> list[Any]:
    """Return the tensors of vLLM's KV cache; engine V1 has them in its model runner, V0 in its worker."""
    worker = vllm_worker(engine)
    for holder, name in ((worker.model_runner, "kv_caches"), (worker, "gpu_cache"), (worker, "cpu_cache")):
        if caches := getattr(holder, name, None):
            return caches
    return []
