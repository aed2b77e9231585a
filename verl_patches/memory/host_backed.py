"""Device storages whose contents can wait on the host, in memory that is allocated once; tensors stay views of them.

Offloaded, a storage is resized to 0, so its memory goes back to the allocator's pool; loaded, it is resized again, as
verl does it (verl/utils/megatron_utils.py, offload_megatron_model_to_cpu). Copies run on the device's current stream,
in whose order the pool hands memory on; the caller synchronises once at the end (`synchronise`).

ModelOffloadState: parameters and gradients of one Megatron model chunk. Parameters that were loaded for reading only
are freed, not copied back. Whether they were written to all the same is read from each parameter's version, which
autograd counts: an in-place operation on the parameter itself is seen. Other writes are not seen, and are lost: through
`.data`, through param_data, by a collective (dist.broadcast). Whoever writes like that loads with load_grad=True
before, or sets `written` (checkpoints: worker/memory.py).

OptimizerOffloadState: what a Megatron optimizer owns: fp32 main parameters of 16-bit ones, states but step counts.
DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer of megatron-core 0.8 and 0.12. fp32 parameters
have no main copy: their shards are views of the model's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.memory.counters import TALLY

# torch's allocator of pinned memory rounds each piece up to a power of two (ATen/core/CachingHostAllocator.h)
PIECE_BYTES, _ALIGN_BYTES = 512 << 20, 512


class HostBackedStorage:
    """The storage of `tensor`, on the device or with its contents on the host; `name` is for messages.

    RecipeError if the storage has less memory than its tensor needs.
    """

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.device = name, tensor.device
        self.storage = tensor.untyped_storage()  # held, so that no other storage gets its identity
        self.size_bytes = self.storage.nbytes()
        self.host: list[torch.Tensor] = []
        self.offloaded = False
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() if tensor.is_contiguous() else 1
        if tensor.numel() and self.size_bytes < needed:
            raise RecipeError(
                f"offload: {name}: expected a storage of at least {needed:,} bytes, found "
                f"{self.size_bytes:,}: somebody else has emptied it"
            )

    def check(self, tensor: torch.Tensor) -> None:
        """RecipeError unless `tensor` lies in this storage and that is as large as it was left."""
        found, expected = tensor.untyped_storage(), 0 if self.offloaded else self.size_bytes
        if found._cdata != self.storage._cdata:
            raise RecipeError(
                f"offload: {self.name}: expected the storage that was there before, of {self.size_bytes:,} bytes, "
                f"found another one of {found.nbytes():,} bytes on {found.device}: somebody else has replaced it"
            )
        if found.nbytes() != expected:
            state = "which is offloaded" if self.offloaded else "which is on the device"
            raise RecipeError(
                f"offload: {self.name}, {state}: expected a storage of {expected:,} bytes, found "
                f"{found.nbytes():,}: somebody else has resized it"
            )

    def is_replaced_by(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in another storage of the same size."""
        found = tensor.untyped_storage()
        return found._cdata != self.storage._cdata and found.nbytes() == self.size_bytes

    def with_host_memory_for(self, tensor: torch.Tensor) -> HostBackedStorage:
        """The storage of `tensor`, with the host memory of this one."""
        new = HostBackedStorage(self.name, tensor)
        new.host = self.host
        return new

    def offload(self, copy: bool) -> None:
        """Free the device memory; `copy`: after copying the contents to the host."""
        for device, host in self._pairs() if copy else ():
            _copy(host, device)
        self.storage.resize_(0)
        self.offloaded = True

    def allocate(self) -> None:
        """Device memory again, contents undefined."""
        self.storage.resize_(self.size_bytes)
        self.offloaded = False

    def load(self) -> None:
        """Device memory again, with the contents from the host."""
        self.allocate()
        for device, host in self._pairs():
            _copy(device, host)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)
        return list(zip(whole.split([piece.numel() for piece in self.host]), self.host, strict=True))


def offload_storages(storages: Sequence[HostBackedStorage], copy: bool = True) -> int:
    """Offload those that are on the device; returns their bytes. What was never on the host is always copied."""
    here = [each for each in storages if not each.offloaded and each.size_bytes]
    fresh = [not each.host for each in here]
    if any(fresh):
        _make_host_memory([each for each, new in zip(here, fresh, strict=True) if new])
    with torch.no_grad():
        for each, new in zip(here, fresh, strict=True):
            each.offload(copy or new)
    return sum(each.size_bytes for each in here)


def load_storages(storages: Sequence[HostBackedStorage]) -> int:
    """Load those that are offloaded; returns their bytes."""
    offloaded = [each for each in storages if each.offloaded]
    with torch.no_grad():
        for each in offloaded:
            each.load()
    return sum(each.size_bytes for each in offloaded)


def unique(storages: Iterable[HostBackedStorage]) -> list[HostBackedStorage]:
    """Each once, in order."""
    return list(dict.fromkeys(storages))


def synchronise(storages: Iterable[HostBackedStorage]) -> None:
    """Wait for the copies on the current stream of their device."""
    for device in {each.device for each in storages if each.device.type != "cpu"}:
        getattr(torch, device.type).current_stream(device).synchronize()


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)
    TALLY.copies += 1
    TALLY.copied_bytes += source.numel()


def _make_host_memory(storages: Sequence[HostBackedStorage]) -> None:
    """Pieces that several small storages share, and of which a large one takes several; pinned where there is a device.

    On a CPU each storage has pieces of its own: nothing rounds them up.
    """
    left = sum(-(-each.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES for each in storages)
    piece, used = _allocate(0, storages[0].device), 0
    for each in storages:
        wanted = each.size_bytes
        while wanted:
            if used == piece.numel() or each.device.type == "cpu":
                size = wanted if each.device.type == "cpu" else left
                piece, used = _allocate(min(PIECE_BYTES, size), each.device), 0
            taken = min(wanted, piece.numel() - used)
            each.host.append(piece[used : used + taken])
            padded = -(-taken // _ALIGN_BYTES) * _ALIGN_BYTES
            used, left, wanted = min(used + padded, piece.numel()), left - padded, wanted - taken


def _allocate(size_bytes: int, device: Any) -> torch.Tensor:
    if size_bytes:
        TALLY.host_allocations += 1
        TALLY.host_bytes += size_bytes
    # a CPU has one memory, and under platform cpu torch.cuda only looks as if it were there
    return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=bool(size_bytes) and device.type != "cpu")


Named = Iterable[tuple[str, torch.Tensor]]


class ModelOffloadState:
    """Parameters and gradients of one model chunk. `group`: actor_params in DDP, else ref_params."""

    def __init__(self, chunk: torch.nn.Module):
        from megatron.core.distributed import DistributedDataParallel

        in_ddp = isinstance(chunk, DistributedDataParallel)
        self.group = "actor_params" if in_ddp else "ref_params"
        self.weights = list(chunk.named_parameters())
        self.buffers = (
            [
                (f"{kind}[{number}]", buffer)
                for kind in ("buffers", "expert_parallel_buffers")
                for number, buffer in enumerate(getattr(chunk, kind))
            ]
            if in_ddp
            else []
        )
        self.params = _storages(self.group, self._param_tensors())
        self.grads = _storages("grads", self._grad_tensors())
        self.written = True  # on the device there may be what the host has not
        self.versions: dict[str, int] = {}

    def _param_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, buffer in self.buffers:
            if buffer.param_data is not None:
                yield f"{name}.param_data", buffer.param_data
            else:  # without a distributed optimizer parameters have memory of their own
                yield from ((f"{name}.param_index_map[{at}]", p) for at, p in enumerate(buffer.param_index_map))
        if not self.buffers:
            yield from self.weights

    def _grad_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"{name}.grad_data", buffer.grad_data) for name, buffer in self.buffers)

    @property
    def offloaded(self) -> bool:
        """Whether any parameters are offloaded."""
        return any(each.offloaded for each in self.params.values())

    def load(self) -> int:
        """Parameters are on the device; returns the bytes that were loaded."""
        _check(self.params, self._param_tensors())
        loaded = load_storages(unique(self.params.values()))
        if loaded:
            self.written = False
            self.versions = {name: parameter._version for name, parameter in self.weights}
        return loaded

    def make_gradients(self) -> int:
        """Gradients are on the device, zero, and training may write to the parameters; returns the bytes allocated."""
        _check(self.grads, self._grad_tensors())
        self.written = True
        offloaded = [each for each in self.grads.values() if each.offloaded]
        for each in offloaded:
            each.allocate()
        with torch.no_grad():
            for _, tensor in self._grad_tensors():
                tensor.zero_()
        return sum(each.size_bytes for each in offloaded)

    def offload(self) -> tuple[str, int]:
        """Parameters are off the device; returns the verb, offload (copied) or free, and the bytes."""
        _check(self.params, self._param_tensors())
        self._refuse_unknown_writes()
        written, self.written = self.written, False
        return "offload" if written else "free", offload_storages(unique(self.params.values()), copy=written)

    def drop_gradients(self) -> int:
        """Gradients are not on the device; returns the bytes freed."""
        _check(self.grads, self._grad_tensors())
        here = [each for each in self.grads.values() if not each.offloaded]
        for each in here:
            each.offload(copy=False)
        return sum(each.size_bytes for each in here)

    def _refuse_unknown_writes(self) -> None:
        """RecipeError for those that a parameter's version shows; which it does not show: the head of this file."""
        for name, parameter in self.weights:
            if not self.buffers and parameter.grad is not None:
                raise RecipeError(
                    f"offload: {name} of a model without DDP has a gradient, which would stay on the "
                    "device: expected none, as in a reference model"
                )
            if not self.written and parameter._version != self.versions.get(name, parameter._version):
                raise RecipeError(
                    f"offload: {self.group}, {name}: expected the weights that came from the host, found them written "
                    "to although they were loaded for reading only (load_grad=False): the host copy is stale and would "
                    "undo that; load with load_grad=True before writing"
                )


def _storages(group: str, tensors: Named) -> dict[str, HostBackedStorage]:
    """{name: HostBackedStorage}; names whose tensors share a storage (tied weights) share one."""
    by_storage: dict[int, HostBackedStorage] = {}
    found = {}
    for name, tensor in tensors:
        key = tensor.untyped_storage()._cdata
        by_storage[key] = by_storage.get(key) or HostBackedStorage(f"{group}, {name}", tensor)
        found[name] = by_storage[key]
    return found


def _check(storages: dict[str, HostBackedStorage], tensors: Named) -> None:
    for name, tensor in tensors:
        storages[name].check(tensor)


def offload_state_of_model(chunk: torch.nn.Module) -> ModelOffloadState:
    """The state of one chunk, one object for its lifetime."""
    if not hasattr(chunk, "recipe_offload_state"):
        chunk.recipe_offload_state = ModelOffloadState(chunk)
    return chunk.recipe_offload_state


_MAIN_GROUPS = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")


class OptimizerOffloadState:
    """Storages of one Megatron optimizer, by name; Adam's states are created in the first step and added when seen.

    ConfigError for an optimizer that has its own way to the host.
    """

    def __init__(self, megatron: Any):
        if type(megatron.optimizer).__name__ == "HybridDeviceOptimizer":
            raise ConfigError(
                "offload: Megatron's optimizer_cpu_offload keeps part of this optimizer on the host by "
                "itself: set actor.megatron.optimizer_offload=false"
            )
        self.megatron = megatron
        self.swapped = False  # then only swap_optimizer.py loads it, in pieces during a step
        self.mains = {id(main) for name in _MAIN_GROUPS for group in getattr(megatron, name, ()) for main in group}
        self.storages: dict[str, HostBackedStorage] = {}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the inner optimizer steps: main parameters, or fp32 ones of the model."""
        for number, group in enumerate(self.megatron.optimizer.param_groups):
            yield from ((f"group {number}, parameter {at}", parameter) for at, parameter in enumerate(group["params"]))

    def storages_of(self, name: str, parameter: torch.Tensor) -> list[HostBackedStorage]:
        """Storages of what is owned for one of `parameters`; RecipeError where one was replaced or resized."""
        owned = [(f"{name}, main", parameter)] if id(parameter) in self.mains else []
        states = self.megatron.optimizer.state.get(parameter, {})
        owned += [
            (f"{name}, {key}", state)
            for key, state in states.items()
            if isinstance(state, torch.Tensor) and state.dim()
        ]
        return [self._storage(*each) for each in owned]

    def _storage(self, name: str, tensor: torch.Tensor) -> HostBackedStorage:
        known = self.storages.get(name)
        if known is None:
            self.storages[name] = HostBackedStorage(f"optimizer, {name}", tensor)
        elif not known.offloaded and known.is_replaced_by(tensor):  # a checkpoint was loaded
            self.storages[name] = known.with_host_memory_for(tensor)
        else:
            known.check(tensor)
        return self.storages[name]

    def all(self) -> list[HostBackedStorage]:
        """Every storage there is now."""
        return [each for name, parameter in self.parameters() for each in self.storages_of(name, parameter)]

    @property
    def offloaded(self) -> bool:
        """Whether any of it is offloaded."""
        return any(each.offloaded for each in self.storages.values())

    def load(self) -> int:
        """All of it is on the device; returns the bytes loaded."""
        return load_storages(self.all())

    def offload(self) -> int:
        """None of it is on the device; returns the bytes offloaded."""
        return offload_storages(self.all())


def offload_state_of_optimizer(megatron: Any) -> OptimizerOffloadState:
    """The state of one Megatron optimizer, one object for its lifetime."""
    if not hasattr(megatron, "recipe_offload_state"):
        megatron.recipe_offload_state = OptimizerOffloadState(megatron)
    return megatron.recipe_offload_state


def single_optimizers(optimizers: Any) -> list[Any]:
    """The optimizers of a chain, or the one; without those that have nothing to train on this rank."""
    return [one for one in getattr(optimizers, "chained_optimizers", [optimizers]) if one.optimizer is not None]
