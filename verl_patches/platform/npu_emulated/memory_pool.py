"""The allocator of vllm-ascend's sleep mode over host memory: its C extension, and torch_npu's pluggable allocator.

On a device each segment that torch allocates inside `use_mem_pool` goes through the C extension
(csrc/camem_allocator.cpp), which calls back CaMemAllocator with (device, size, pointer, handle). Here each storage that
is made inside is one segment. Unmapped memory is filled with bytes 0xFF, which are NaN in every floating dtype and -1
in integers: an operation that reads it shows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Handle = tuple[int, int, int, int]


class _Pool:
    """State of this process's pool."""

    malloc: Callable[[Handle], None] | None = None
    open = 0  # use_mem_pool that are entered
    storages: dict[int, torch.UntypedStorage] = {}  # by address; a pool gives nothing back
    unmapped: set[int] = set()


def in_use() -> bool:
    """Whether a use_mem_pool is entered."""
    return _Pool.open > 0


def mapped_bytes() -> int:
    """Bytes of the pool that are mapped."""
    return sum(s.nbytes() for address, s in _Pool.storages.items() if address not in _Pool.unmapped)


def report(tensor: torch.Tensor) -> None:
    """Call back CaMemAllocator with the storage of `tensor`, unless it was reported."""
    storage = tensor.untyped_storage()
    address, size = storage.data_ptr(), storage.nbytes()
    if size and address not in _Pool.storages:
        _Pool.storages[address] = storage
        _Pool.malloc((0, size, address, address))


class _Derived(TorchDispatchMode):
    """What is computed from tensors of the pool is allocated in it too."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        if addresses & _Pool.storages.keys():
            for tensor in tree_leaves(made):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in addresses:
                    report(tensor)
        return made


def memory_snapshot() -> list[dict[str, Any]]:
    """As torch's: one segment with one block a storage."""
    return [
        {"address": address, "total_size": s.nbytes(), "blocks": [{"address": address, "state": "active_allocated"}]}
        for address, s in _Pool.storages.items()
    ]


def record_memory_history(enabled: str | None = "all", *args: Any, **kwargs: Any) -> None:
    """As torch_npu.npu.memory._record_memory_history; host memory has no allocator that could record its calls."""


def snapshot(device: Any = None) -> dict[str, list[Any]]:
    """As torch_npu.npu.memory._snapshot: the segments of sleep mode, the one allocator here."""
    return {"segments": memory_snapshot(), "device_traces": []}


# -- vllm_ascend.vllm_ascend_C -----------------------------------------------------------------------------------------


def init_module(malloc: Callable[[Handle], None], free: Callable[[int], Handle]) -> None:
    """Remember what to call for each segment; none is ever freed."""
    _Pool.malloc = malloc


def python_create_and_map(device: int, size: int, address: int, handle: int) -> None:
    """Map a segment again; RuntimeError where it is mapped."""
    if address not in _Pool.unmapped:
        raise RuntimeError(f"vllm_ascend_C: the segment at {address:#x} is mapped already")
    _Pool.unmapped.discard(address)


def python_unmap_and_release(device: int, size: int, address: int, handle: int) -> None:
    """Unmap a segment and poison its bytes; RuntimeError where it is not mapped."""
    if address in _Pool.unmapped or address not in _Pool.storages:
        raise RuntimeError(f"vllm_ascend_C: the segment at {address:#x} is not mapped")
    ctypes.memset(address, 0xFF, size)
    _Pool.unmapped.add(address)


def memcpy(dst: int, dst_bytes: int, src: int, size: int, kind: int) -> int:
    """acl.rt.memcpy; 0, or a code where `size` does not fit."""
    if size > dst_bytes:
        return 107000  # ACL_ERROR_RT_PARAM_INVALID
    ctypes.memmove(dst, src, size)
    return 0


# -- torch_npu.npu.memory ----------------------------------------------------------------------------------------------


class NPUPluggableAllocator:
    """The functions of a library that allocate; the library is this module."""

    def __init__(self, path_to_so_file: str | None, alloc_fn_name: str, free_fn_name: str):
        self._allocator = (path_to_so_file, alloc_fn_name, free_fn_name)


class MemPool:
    """A pool of one allocator."""

    def __init__(self, allocator: Any = None):
        self.allocator = allocator


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Tensors of the device that are made inside are reported as segments."""
    _Pool.open += 1
    try:
        with _Derived():
            yield
    finally:
        _Pool.open -= 1
