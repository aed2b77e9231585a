"""How many bytes Megatron's and vLLM's objects hold on the device now. Imports torch: for workers only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


def held_bytes(tensors: Iterable[Any], device_type: str) -> int:
    """Bytes of the storages behind `tensors` that are on a device of `device_type`, each storage once.

    A storage that was resized to 0 holds nothing. None, and lists or tuples of tensors, may stand among them.
    """
    storages = {}
    for tensor in tensors_in(tensors):
        if tensor.device.type == device_type:
            storage = tensor.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def tensors_in(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Every tensor of nested lists and tuples, in order, without None."""
    for each in tensors:
        if isinstance(each, (list, tuple)):
            yield from tensors_in(each)
        elif each is not None:
            yield each


def buffers_of(chunks: Sequence[Any]) -> list[Any]:
    """Megatron's buffers of a model in DDP, those of its routed experts too."""
    return [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]


def parameters_of(models: Sequence[torch.nn.Module]) -> list[torch.Tensor]:
    """Every parameter of a list of models."""
    return [parameter for model in models for parameter in model.parameters()]


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """What Megatron's distributed optimizer owns: fp32 main parameters of 16-bit ones, and Adam's moments so far.

    fp32 parameters have no main copy: their shards are views of the parameters.
    """
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        yield from tensors_in(each.shard_fp32_from_float16_groups)
        for state in each.optimizer.state.values():
            yield from (state[name] for name in MOMENTS if name in state)


def optimizer_full_bytes(optimizer: Any) -> int:
    """Bytes of `optimizer_tensors` once the moments have been made."""
    total = 0
    for each in getattr(optimizer, "chained_optimizers", [optimizer]):
        main = sum(tensor.numel() for tensor in tensors_in(each.shard_fp32_from_float16_groups))
        own = sum(tensor.numel() for tensor in tensors_in(each.shard_fp32_groups))
        total += 4 * (len(MOMENTS) * (main + own) + main)
    return total


def vllm_worker(engine: Any) -> Any:
    """The worker of an in-process LLM, as verl reaches it (verl/workers/sharding_manager/megatron_vllm.py)."""
    return engine.llm_engine.model_executor.driver_worker.worker


def has_sleep_mode(engine: Any) -> bool:
    """Whether vLLM's sleep mode is on, which unmaps memory that tensors go on pointing at."""
    return engine.llm_engine.vllm_config.model_config.enable_sleep_mode


def kv_caches(engine: Any) -> list[Any]:
    """The tensors of vLLM's KV cache: engine V1 keeps them in its model runner, V0 in its worker."""
    worker = vllm_worker(engine)
    for holder, name in ((worker.model_runner, "kv_caches"), (worker, "gpu_cache"), (worker, "cpu_cache")):
        found = getattr(holder, name, None)
        if found:
            return found
    return []
