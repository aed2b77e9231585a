"""Routed experts take part in verl 54c9b736's offload of Megatron models, as verl 0.4.0 does it itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def with_expert_buffers(original: Callable) -> Callable:
    """Row provider for load_megatron_model_to_gpu and offload_megatron_model_to_cpu: all buffers of a DDP.

    verl goes over `buffers`; Megatron core_r0.8.0 keeps the parameters and gradients of experts that are split over
    ranks in `expert_parallel_buffers` (megatron/core/distributed/distributed_data_parallel.py:168). During the call
    `buffers` is both lists, so that verl does to one what it does to the other. Models without DDP (the reference) pass
    through: verl moves them parameter by parameter.
    """

    @functools.wraps(original)
    def call(models: list, *args: Any, **kwargs: Any) -> Any:
        from megatron.core.distributed import DistributedDataParallel

        before = {chunk: chunk.buffers for chunk in models if isinstance(chunk, DistributedDataParallel)}
        try:
            for chunk, buffers in before.items():
                chunk.buffers = [*buffers, *chunk.expert_parallel_buffers]
            return original(models, *args, **kwargs)
        finally:
            for chunk, buffers in before.items():
                chunk.buffers = buffers

    return call
