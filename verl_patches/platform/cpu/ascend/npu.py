"""Stands for `torch_npu.npu`, which is `torch.npu` too: the device, answered by the CPU as torch.cuda is here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_patches.platform.cpu import torch_on_cpu
from verl_patches.platform.cpu.ascend.missing import refuse_unknown
from verl_patches.platform.cpu.torch_on_cpu import (
    Event,
    Stream,
    current_device,
    device_count,
    get_device_properties,
    get_rng_state,
    is_available,
    manual_seed,
    mem_get_info,
    set_device,
    set_rng_state,
    stream,
    synchronize,
)

__all__ = [
    "Event", "FloatTensor", "Stream", "current_device", "current_stream", "default_generators", "default_stream",
    "device", "device_count", "empty_cache", "get_device_properties", "get_rng_state", "is_available", "manual_seed",
    "manual_seed_all", "max_memory_allocated", "max_memory_reserved", "mem_get_info", "memory_allocated",
    "memory_reserved", "reset_max_memory_allocated", "set_compile_mode", "set_device", "set_rng_state", "stream",
    "synchronize",
]  # fmt: skip
__getattr__ = refuse_unknown("torch_npu.npu", "npu.py")

FloatTensor = torch.FloatTensor
_STREAM = Stream()


def current_stream(device: Any = None) -> Stream:
    """The one that `stream` entered, or the default one."""
    entered = torch_on_cpu.current_stream()
    return entered if isinstance(entered, Stream) else _STREAM


def default_stream(device: Any = None) -> Stream:
    """The one that all work is in at first."""
    return _STREAM


class _Generators:
    """One device, whose random numbers are the CPU's; MindSpeed asks by index, here torch.device("cpu")."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


default_generators = _Generators()


class device:
    """Context manager that chooses a device; there is one."""

    def __init__(self, device: Any):
        self.idx = device

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


def _lazy_call(callable: Callable[[], Any], **kwargs: Any) -> None:
    """Call at once: torch_npu queues it until the device is there, which it is."""
    callable()


def manual_seed_all(seed: int) -> None:
    """Seed the CPU generator."""
    manual_seed(seed)


def set_compile_mode(jit_compile: bool = False) -> None:
    """Nothing is compiled."""


def empty_cache() -> None:
    """Nothing is cached."""


def memory_allocated(device: Any = None) -> int:
    """No byte is on a device."""
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_allocated


def reset_max_memory_allocated(device: Any = None) -> None:
    """Nothing is counted."""
