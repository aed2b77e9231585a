"""Account for the emulated device's memory, for torch's allocator and for that of vllm-ascend's sleep mode.

All memory is the host's. A storage counts as the device's if it is made for the device by name, or by an operation on
such storages (`count_storages`). Memory that is freed stays reserved by torch's allocator until empty_cache, and counts
as used for the driver. Each process has a device of its own, as each worker has on a node.

On a device each segment that torch allocates inside `use_mem_pool` goes through the C extension of sleep mode
(csrc/camem_allocator.cpp), which calls back CaMemAllocator with (device, size, pointer, handle). Here each storage that
is made inside is one segment. Unmapped memory is filled with bytes 0xFF, which are NaN in every floating dtype and -1
in integers, so that an operation that reads it is noticed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

Handle = tuple[int, int, int, int]


class _Device:
    """Hold the device's storages by the address of their StorageImpl, which stays taken while its reference is here."""

    storages: dict[int, StorageWeakRef] = {}
    reserved = 0  # bytes that torch's allocator holds, as of the last count
    cleanup_count = 1 << 10  # number of storages at which freed ones are dropped


class _Pool:
    """Hold the state of this process's memory pool."""

    malloc: Callable[[Handle], None] | None = None
    open_contexts = 0  # how many use_mem_pool contexts are entered
    storages: dict[int, torch.UntypedStorage] = {}  # by address; a pool frees none
    unmapped: set[int] = set()


def count_storages(made: Any, inputs: Iterable[Any], for_device: bool) -> None:
    """Count the storages of a function's result `made` as the device's if `for_device`, or if made of the device's.

    Inside a pool, CaMemAllocator is called back with them.
    """
    for storage in _storages((made,)):
        if storage._cdata in _Device.storages or storage.device.type != "cpu":
            continue
        if for_device or _derives_from_device(storage, inputs):
            _Device.storages[storage._cdata] = StorageWeakRef(storage)
            if _Pool.open_contexts:
                _report_segment(storage)
    if len(_Device.storages) > _Device.cleanup_count:
        allocated_bytes()
        _Device.cleanup_count = 1024 + 2 * len(_Device.storages)


def _derives_from_device(storage: torch.UntypedStorage, inputs: Iterable[Any]) -> bool:
    """Return whether an input is the device's and none has this storage: host.copy_(device) returns a host tensor."""
    cdata = {each._cdata for each in _storages(inputs)}
    return storage._cdata not in cdata and not cdata.isdisjoint(_Device.storages)


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of the dense tensors in `values`, nested lists and tuples included."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value.untyped_storage()
        elif isinstance(value, (list, tuple)):
            yield from _storages(value)


def _report_segment(storage: torch.UntypedStorage) -> None:
    address, size = storage.data_ptr(), storage.nbytes()
    if size and address not in _Pool.storages:
        _Pool.storages[address] = storage
        assert _Pool.malloc is not None  # CaMemAllocator calls init_module before it opens a pool
        _Pool.malloc((0, size, address, address))


def allocated_bytes(device: Any = None) -> int:
    """Return torch.npu.memory_allocated: bytes of the device's storages, those unmapped by sleep mode included."""
    total = 0
    for cdata, reference in list(_Device.storages.items()):
        if reference.expired():
            del _Device.storages[cdata]
        else:
            total += torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()
    _Device.reserved = max(_Device.reserved, total)
    return total


def reserved_bytes(device: Any = None) -> int:
    """Return torch.npu.memory_reserved: the bytes that torch's allocator holds."""
    allocated_bytes()
    return _Device.reserved


def empty_cache() -> None:
    """Return cached memory from torch's allocator to the driver, as torch.npu.empty_cache."""
    _Device.reserved = 0
    allocated_bytes()


def used_bytes() -> int:
    """Return the bytes that the driver counts as used."""
    return reserved_bytes() - sum(_Pool.storages[address].nbytes() for address in _Pool.unmapped)


def memory_snapshot() -> list[dict[str, Any]]:
    """Return one segment with one block for each storage, as torch's memory_snapshot."""
    return [
        {"address": address, "total_size": s.nbytes(), "blocks": [{"address": address, "state": "active_allocated"}]}
        for address, s in _Pool.storages.items()
    ]


def record_memory_history(enabled: str | None = "all", *args: Any, **kwargs: Any) -> None:
    """Do nothing for torch_npu.npu.memory._record_memory_history: no allocator of host memory records its calls."""


def snapshot(device: Any = None) -> dict[str, list[Any]]:
    """Return the segments of sleep mode, the one allocator here, as torch_npu.npu.memory._snapshot."""
    return {"segments": memory_snapshot(), "device_traces": []}


# -- vllm_ascend.vllm_ascend_C -----------------------------------------------------------------------------------------


def init_module(malloc: Callable[[Handle], None], free: Callable[[int], Handle]) -> None:
    """Store the function to call for each new segment; segments are never freed."""
    _Pool.malloc = malloc


def python_create_and_map(device: int, size: int, address: int, handle: int) -> None:
    """Map a segment again; raise RuntimeError if it is mapped."""
    if address not in _Pool.unmapped:
        raise RuntimeError(f"vllm_ascend_C: the segment at {address:#x} is already mapped")
    _Pool.unmapped.discard(address)


def python_unmap_and_release(device: int, size: int, address: int, handle: int) -> None:
    """Unmap a segment and overwrite its bytes; raise RuntimeError if it is not mapped."""
    if address in _Pool.unmapped or address not in _Pool.storages:
        raise RuntimeError(f"vllm_ascend_C: the segment at {address:#x} is not mapped")
    ctypes.memset(address, 0xFF, size)
    _Pool.unmapped.add(address)


def memcpy(dst: int, dst_bytes: int, src: int, size: int, kind: int) -> int:
    """Copy memory as acl.rt.memcpy; return 0, or an error code if `size` does not fit."""
    if size > dst_bytes:
        return 107000  # ACL_ERROR_RT_PARAM_INVALID
    ctypes.memmove(dst, src, size)
    return 0


# -- torch_npu.npu.memory ----------------------------------------------------------------------------------------------


class NPUPluggableAllocator:
    """Stand in for torch_npu's pluggable allocator: the functions of a library, which is this module."""

    def __init__(self, path_to_so_file: str | None, alloc_fn_name: str, free_fn_name: str):
        self._allocator = (path_to_so_file, alloc_fn_name, free_fn_name)


class MemPool:
    """Stand in for torch_npu's pool of one allocator."""

    def __init__(self, allocator: Any = None):
        self.allocator = allocator


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """Report storages of the device that are made inside as segments."""
    _Pool.open_contexts += 1
    try:
        yield
    finally:
        _Pool.open_contexts -= 1
