"""Offload storages to host memory and load them back, while tensors stay views of the same storage.

An offloaded storage is resized to 0, which returns its memory to the allocator; loading resizes it back, as
verl/utils/megatron_utils.py does. Host memory is allocated once. Copies run on the device's current stream; the caller
waits for them once at the end (`synchronise`).

`ModelOffloadState` covers one Megatron model chunk, `OptimizerOffloadState` one Megatron optimizer. Parameters that
were loaded for reading are freed without a copy, so a write to them would be lost. An in-place operation on the
parameter changes its autograd version and is refused. A write through `.data` or `param_data`, or by a collective such
as dist.broadcast, is not detected: code that writes this way must first allocate gradients or set `written` (as
worker/memory.py does for checkpoints).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from verl_patches.errors import RecipeError
from verl_patches.memory.counters import note_host_allocation, note_move
from verl_patches.memory.schedule import ACTOR

# torch's allocator of pinned memory rounds each piece up to a power of two (ATen/core/CachingHostAllocator.h)
PIECE_BYTES, _ALIGN_BYTES = 512 << 20, 512


class HostBackedStorage:
    """Hold the storage of `tensor`, which is on the device or offloaded to the host; `name` is for messages."""

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.device = name, tensor.device
        self.storage = tensor.untyped_storage()  # held, so that no other storage gets its identity
        self.size_bytes = self.storage.nbytes()
        self.host: list[torch.Tensor] = []
        self.offloaded = False

    def check(self, tensor: torch.Tensor) -> None:
        """Raise RecipeError unless `tensor` lies in this storage, and the storage has the size that was set here."""
        storage, expected = tensor.untyped_storage(), 0 if self.offloaded else self.size_bytes
        if storage._cdata != self.storage._cdata or storage.nbytes() != expected:
            which = "its original" if storage._cdata == self.storage._cdata else "another"
            raise RecipeError(
                f"offload: {self.name}: expected its original storage, of {expected:,} bytes, found {which} one, of "
                f"{storage.nbytes():,} bytes on {storage.device}: other code has replaced or resized it"
            )

    def offload(self, copy: bool) -> None:
        """Free the device memory; with `copy` the contents are copied to the host before."""
        if copy:
            self.copy_to_host()
        self.storage.resize_(0)
        self.offloaded = True

    def allocate(self) -> None:
        """Allocate the device memory; its contents are undefined."""
        self.storage.resize_(self.size_bytes)
        self.offloaded = False

    def load(self) -> None:
        """Allocate the device memory and copy the contents from the host."""
        self.allocate()
        for device, host in self._piece_pairs():
            device.copy_(host, non_blocking=True)

    def copy_to_host(self) -> None:
        """Copy the contents to the host memory, which must exist, and keep them on the device too."""
        for device, host in self._piece_pairs():
            host.copy_(device, non_blocking=True)

    def host_tensor(
        self, dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int], offset: int
    ) -> torch.Tensor:
        """Return a tensor in this storage as it was copied to the host last; `offset` is in elements.

        It is a view of the host memory, or a copy where it lies in several pieces of it.
        """
        reach = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        start, stop, at, parts = offset * dtype.itemsize, (offset + reach) * dtype.itemsize, 0, []
        for piece in self.host:
            if at < stop and start < at + piece.numel():
                parts.append(piece[max(0, start - at) : stop - at])
            at += piece.numel()
        whole = (parts[0] if len(parts) == 1 else torch.cat(parts)).view(dtype)
        return whole.as_strided(shape, strides, whole.storage_offset())

    def _piece_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        contents = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)
        return list(zip(contents.split([piece.numel() for piece in self.host]), self.host, strict=True))


def offload_storages(storages: Iterable[HostBackedStorage], copy: bool = True) -> int:
    """Offload the storages that are on the device and return their bytes; a first offload always copies."""
    here, fresh = _device_storages(storages)
    with torch.no_grad():
        for storage in here:
            storage.offload(copy or storage in fresh)
    return sum(storage.size_bytes for storage in here)


def load_storages(storages: Iterable[HostBackedStorage]) -> int:
    """Load the storages that are offloaded and return their bytes."""
    offloaded = [storage for storage in dict.fromkeys(storages) if storage.offloaded]
    with torch.no_grad():
        for storage in offloaded:
            storage.load()
    return sum(storage.size_bytes for storage in offloaded)


def copy_storages_to_host(storages: Iterable[HostBackedStorage]) -> int:
    """Update the host copies of the storages that are on the device and return their bytes."""
    here, _ = _device_storages(storages)
    with torch.no_grad():
        for storage in here:
            storage.copy_to_host()
    return sum(storage.size_bytes for storage in here)


def _device_storages(storages: Iterable[HostBackedStorage]) -> tuple[list[HostBackedStorage], list[HostBackedStorage]]:
    """Return (storages on the device, those of them that had no host memory); gives host memory to the latter."""
    here = [storage for storage in dict.fromkeys(storages) if not storage.offloaded and storage.size_bytes]
    fresh = [storage for storage in here if not storage.host]
    if fresh:
        _make_host_memory(fresh)
    return here, fresh


def synchronise(storages: Iterable[HostBackedStorage]) -> None:
    """Wait for the copies on the current stream of their devices."""
    for device in {storage.device for storage in storages if storage.device.type != "cpu"}:
        getattr(torch, device.type).current_stream(device).synchronize()


def _make_host_memory(storages: list[HostBackedStorage]) -> None:
    """Allocate the host memory of `storages` in pieces: small storages share one, a large one takes several.

    The memory is pinned unless the device is a CPU. Memory that is not pinned is not rounded up, so on a CPU each
    storage has pieces of its own.
    """
    left = sum(_aligned_bytes(storage.size_bytes) for storage in storages)
    piece, used = _allocate(0, storages[0].device), 0
    for storage in storages:
        wanted, on_cpu = storage.size_bytes, storage.device.type == "cpu"
        while wanted:
            if used == piece.numel() or on_cpu:
                piece, used = _allocate(min(PIECE_BYTES, wanted if on_cpu else left), storage.device), 0
            taken = min(wanted, piece.numel() - used)
            storage.host.append(piece[used : used + taken])
            used = min(used + _aligned_bytes(taken), piece.numel())
            left -= _aligned_bytes(taken)
            wanted -= taken


def _aligned_bytes(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _allocate(size_bytes: int, device: Any) -> torch.Tensor:
    note_host_allocation(size_bytes)
    # a CPU has one memory, and under platform cpu torch.cuda is only emulated
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=bool(size_bytes) and device.type != "cpu")


class ModelOffloadState:
    """Offload and load the parameters and gradients of one Megatron model chunk.

    The chunk may name its `memory_groups`; without them they are the actor's, or the reference's outside of DDP. Every
    method raises RecipeError if other code has replaced or resized a storage.
    """

    def __init__(self, chunk: torch.nn.Module):
        from megatron.core.distributed import DistributedDataParallel

        in_ddp = isinstance(chunk, DistributedDataParallel)
        self.groups = getattr(chunk, "memory_groups", ACTOR if in_ddp else ACTOR._replace(params="ref_params"))
        self.group = self.groups.params
        self.weights = list(chunk.named_parameters())
        kinds = ("buffers", "expert_parallel_buffers") if in_ddp else ()
        self.buffers = {f"{kind}[{i}]": buffer for kind in kinds for i, buffer in enumerate(getattr(chunk, kind))}
        self.params = self._storages(self.group, self._param_tensors())
        self.grads = self._storages(self.groups.grads, self._grad_tensors())
        self.written = True  # whether the device may hold values that the host copy does not
        self.versions: dict[str, int] = {}

    @staticmethod
    def _storages(group: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, HostBackedStorage]:
        """Return {name: HostBackedStorage}; names whose tensors share a storage (tied weights) share one."""
        by_storage: dict[int, HostBackedStorage] = {}
        found = ((name, HostBackedStorage(f"{group}, {name}", tensor)) for name, tensor in tensors)
        return {name: by_storage.setdefault(each.storage._cdata, each) for name, each in found}

    def _param_tensors(self) -> list[tuple[str, torch.Tensor]]:
        in_buffers = [(f"{name}.param_data", buffer.param_data) for name, buffer in self.buffers.items()]
        return in_buffers or self.weights

    def _grad_tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"{name}.grad_data", buffer.grad_data) for name, buffer in self.buffers.items()]

    def _checked_params(self) -> Iterable[HostBackedStorage]:
        return _checked(self.params, self._param_tensors())

    def _checked_grads(self) -> Iterable[HostBackedStorage]:
        return _checked(self.grads, self._grad_tensors())

    def _note_current_host_copy(self) -> None:
        self.written = False
        self.versions = {name: parameter._version for name, parameter in self.weights}

    @property
    def offloaded(self) -> bool:
        """Return whether any parameters are offloaded."""
        return any(storage.offloaded for storage in self.params.values())

    def load_params(self) -> None:
        """Load the parameters for reading only."""
        loaded = load_storages(self._checked_params())
        note_move("load", self.group, loaded)
        if loaded:
            self._note_current_host_copy()

    def offload_params(self) -> None:
        """Offload the parameters; they are copied only if they may have been written since they were loaded."""
        params = self._checked_params()
        self._refuse_unknown_writes()
        written, self.written = self.written, False
        note_move("offload" if written else "free", self.group, offload_storages(params, copy=written))

    def copy_params_to_host(self) -> int:
        """Update the host copy of the parameters and return its bytes; the next `offload_params` need not copy."""
        copied = copy_storages_to_host(self._checked_params())
        if copied:
            self._note_current_host_copy()
        return copied

    def alloc_grads(self) -> None:
        """Allocate the gradients and set them to zero; from now on training may write to the parameters."""
        self.written = True
        offloaded = [storage for storage in self._checked_grads() if storage.offloaded]
        with torch.no_grad():
            for storage in offloaded:
                storage.allocate()
            for _, tensor in self._grad_tensors():
                tensor.zero_()
        note_move("alloc", self.groups.grads, sum(storage.size_bytes for storage in offloaded))

    def free_grads(self) -> None:
        """Free the gradients without a copy."""
        here = [storage for storage in self._checked_grads() if not storage.offloaded]
        for storage in here:
            storage.offload(copy=False)
        note_move("free", self.groups.grads, sum(storage.size_bytes for storage in here))

    def _refuse_unknown_writes(self) -> None:
        """Raise RecipeError where a write changed a parameter's version; the file's docstring lists other writes."""
        for name, parameter in self.weights:
            if not self.written and parameter._version != self.versions.get(name, parameter._version):
                raise RecipeError(
                    f"offload: {self.group}, {name}: expected no writes to parameters that were loaded for reading, "
                    "found one: the host copy is stale and the next load would undo the write; allocate gradients "
                    "(Grads.alloc) before writing"
                )


def _checked(
    storages: Mapping[str, HostBackedStorage], tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterable[HostBackedStorage]:
    for name, tensor in tensors:
        storages[name].check(tensor)
    return storages.values()


def model_offload_state(chunk: torch.nn.Module) -> ModelOffloadState:
    """Return the offload state of a model chunk, which is one object for the chunk's lifetime."""
    if not hasattr(chunk, "recipe_offload_state"):
        chunk.recipe_offload_state = ModelOffloadState(chunk)
    return chunk.recipe_offload_state


class OptimizerOffloadState:
    """Offload and load a DistributedOptimizer's fp32 main parameters and states, but not its step counts.

    verl makes no other optimizer. fp32 parameters have no main copy: their shards are views of the model's parameters.
    Adam makes its states in the first step; each move adds those that are new. The optimizer may name its
    `memory_groups`; without them they are the actor's.
    """

    def __init__(self, megatron: Any):
        self.megatron, self.group = megatron, getattr(megatron, "memory_groups", ACTOR).optimizer
        self.mains = {id(main) for group in megatron.shard_fp32_from_float16_groups for main in group}
        self.storages: dict[str, HostBackedStorage] = {}

    def _storage(self, name: str, tensor: torch.Tensor) -> HostBackedStorage:
        known, storage = self.storages.get(name), tensor.untyped_storage()
        if known is None:
            self.storages[name] = HostBackedStorage(f"{self.group}, {name}", tensor)
        elif not known.offloaded and storage._cdata != known.storage._cdata and storage.nbytes() == known.size_bytes:
            self.storages[name] = HostBackedStorage(known.name, tensor)  # loading a checkpoint replaced it
            self.storages[name].host = known.host
        else:
            known.check(tensor)
        return self.storages[name]

    def _all_storages(self) -> list[HostBackedStorage]:
        """Return the present storages; raises RecipeError if other code replaced or resized one."""
        found = []
        for number, group in enumerate(self.megatron.optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                owned = {"main": parameter} if id(parameter) in self.mains else {}
                states = self.megatron.optimizer.state.get(parameter, {})
                owned |= {key: state for key, state in states.items() if torch.is_tensor(state) and state.dim()}
                found += [self._storage(f"group {number}, parameter {i}, {key}", t) for key, t in owned.items()]
        return found

    def load(self) -> int:
        """Load all storages and return the bytes loaded."""
        return load_storages(self._all_storages())

    def offload(self) -> int:
        """Offload all storages and return the bytes offloaded."""
        return offload_storages(self._all_storages())

    def copy_to_host(self) -> int:
        """Update the host copies of the storages that are on the device and return the bytes copied."""
        return copy_storages_to_host(self._all_storages())


def optimizer_offload_state(megatron: Any) -> OptimizerOffloadState:
    """Return the offload state of a Megatron optimizer, which is one object for the optimizer's lifetime."""
    if not hasattr(megatron, "recipe_offload_state"):
        megatron.recipe_offload_state = OptimizerOffloadState(megatron)
    return megatron.recipe_offload_state


def single_optimizers(optimizers: Any) -> list[Any]:
    """Return the optimizers of a chain, or the single one, without those that have no parameters on this rank."""
    return [one for one in getattr(optimizers, "chained_optimizers", [optimizers]) if one.optimizer is not None]
