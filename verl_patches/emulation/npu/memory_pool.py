"""Memory of the emulated device: what is on it, torch's allocator, and that of vllm-ascend's sleep mode; host memory.

On the device is every storage that is made for it by name, and every one that an operation makes of those (`note`).
Memory that is freed stays reserved by torch's allocator until empty_cache, and the driver sees it as used. Each process
has a device of its own, as each worker has on a node.

On a device each segment that torch allocates inside `use_mem_pool` goes through the C extension of sleep mode
(csrc/camem_allocator.cpp), which calls back CaMemAllocator with (device, size, pointer, handle). Here each storage that
is made inside is one segment. Unmapped memory is filled with bytes 0xFF, which are NaN in every floating dtype and -1
in integers: an operation that reads it shows.
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
    """Storages on the device by the address of their StorageImpl, which lives as long as its reference here."""

    storages: dict[int, StorageWeakRef] = {}
    reserved = 0  # bytes of torch's allocator, as of the last look
    looked_at = 1 << 10  # number of storages at which those that have ended are forgotten


class _Pool:
    """State of this process's pool."""

    malloc: Callable[[Handle], None] | None = None
    open = 0  # use_mem_pool that are entered
    storages: dict[int, torch.UntypedStorage] = {}  # by address; a pool gives nothing back
    unmapped: set[int] = set()


def note(made: Any, inputs: Iterable[Any], for_device: bool) -> None:
    """Count the storages of `made`, a function's result, as the device's: `for_device`, or made of some on it.

    In a pool CaMemAllocator is called back with them.
    """
    for storage in _storages((made,)):
        if storage._cdata in _Device.storages or storage.device.type != "cpu":
            continue
        if for_device or _is_made_of(storage, inputs):
            _Device.storages[storage._cdata] = StorageWeakRef(storage)
            if _Pool.open:
                _report(storage)
    if len(_Device.storages) > _Device.looked_at:
        allocated_bytes()
        _Device.looked_at = 1024 + 2 * len(_Device.storages)


def _is_made_of(storage: torch.UntypedStorage, inputs: Iterable[Any]) -> bool:
    """Whether some input is on the device, and none has this storage: a copy to the host returns its host tensor."""
    cdata = {each._cdata for each in _storages(inputs)}
    return storage._cdata not in cdata and not cdata.isdisjoint(_Device.storages)


def _storages(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    """Of the dense tensors among `values` and in lists and tuples among them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                yield value.untyped_storage()
        elif isinstance(value, (list, tuple)):
            yield from _storages(value)


def _report(storage: torch.UntypedStorage) -> None:
    address, size = storage.data_ptr(), storage.nbytes()
    if size and address not in _Pool.storages:
        _Pool.storages[address] = storage
        assert _Pool.malloc is not None  # CaMemAllocator calls init_module before it opens a pool
        _Pool.malloc((0, size, address, address))


def allocated_bytes(device: Any = None) -> int:
    """torch.npu.memory_allocated: bytes of the storages on the device, also of those that sleep mode has unmapped."""
    total = 0
    for cdata, reference in list(_Device.storages.items()):
        if reference.expired():
            del _Device.storages[cdata]
        else:
            total += torch.UntypedStorage._new_with_weak_ptr(reference.cdata).nbytes()
    _Device.reserved = max(_Device.reserved, total)
    return total


def reserved_bytes(device: Any = None) -> int:
    """torch.npu.memory_reserved."""
    allocated_bytes()
    return _Device.reserved


def empty_cache() -> None:
    """torch.npu.empty_cache: torch's allocator returns what it has cached."""
    _Device.reserved = 0
    allocated_bytes()


def used_bytes() -> int:
    """Bytes that the driver has given away."""
    return reserved_bytes() - sum(_Pool.storages[address].nbytes() for address in _Pool.unmapped)


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
    """Storages of the device that are made inside are reported as segments."""
    _Pool.open += 1
    try:
        yield
    finally:
        _Pool.open -= 1
