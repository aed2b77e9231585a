"""Device storages whose contents can wait on the host, in memory that is made once; tensors stay views of them.

A storage that leaves is resized to 0, so its memory goes back to the allocator's pool; coming back it is resized again,
as verl does it (verl/utils/megatron_utils.py, offload_megatron_model_to_cpu). Copies run on the device's current
stream, in whose order the pool hands memory on; whoever moves calls `synchronise` once at the end.

Where the parameters and gradients of one Megatron model chunk go, and what they must be like when they come back.

Parameters that were loaded for reading only are dropped, not copied back. Whether somebody has written to them all the
same is asked of each parameter's version, which autograd counts: an in-place operation on the parameter itself is seen.
Writes past it are not, and are lost: through `.data`, through param_data, by a collective (dist.broadcast). Who writes
like that loads with load_grad=True before, or says so (checkpoints.py).

Where what a Megatron optimizer owns goes: fp32 main parameters of 16-bit ones and all states but step counts.

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


class Parked:
    """The storage below `tensor`, which is on the device or waits on the host; `name` is for messages.

    RecipeError if the storage has less memory than its tensor needs: somebody else has taken it.
    """

    def __init__(self, name: str, tensor: torch.Tensor):
        self.name, self.device = name, tensor.device
        self.storage = tensor.untyped_storage()  # kept: nobody else can get its identity
        self.size_bytes = self.storage.nbytes()
        self.host: list[torch.Tensor] = []
        self.away = False
        needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size() if tensor.is_contiguous() else 1
        if tensor.numel() and self.size_bytes < needed:
            raise RecipeError(f"offload: {name}: expected a storage of at least {needed:,} bytes, found "
                             f"{self.size_bytes:,}: somebody else has emptied it")

    def check(self, tensor: torch.Tensor) -> None:
        """RecipeError unless `tensor` lies in this storage and that is as large as it was left."""
        found, expected = tensor.untyped_storage(), 0 if self.away else self.size_bytes
        if found._cdata != self.storage._cdata:
            raise RecipeError(
                f"offload: {self.name}: expected the storage that was there before, of {self.size_bytes:,} bytes, "
                f"found another one of {found.nbytes():,} bytes on {found.device}: somebody else has replaced it")
        if found.nbytes() != expected:
            state = "which waits on the host" if self.away else "which is on the device"
            raise RecipeError(f"offload: {self.name}, {state}: expected a storage of {expected:,} bytes, found "
                             f"{found.nbytes():,}: somebody else has resized it")

    def is_replaced_by(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` lies in another storage of the same size."""
        found = tensor.untyped_storage()
        return found._cdata != self.storage._cdata and found.nbytes() == self.size_bytes

    def with_host_memory_for(self, tensor: torch.Tensor) -> Parked:
        """The storage below `tensor`, which waits where this one did."""
        new = Parked(self.name, tensor)
        new.host = self.host
        return new

    def leave(self, copy: bool) -> None:
        """Give the device memory back; `copy`: after bringing the contents to the host."""
        for device, host in self._pairs() if copy else ():
            _copy(host, device)
        self.storage.resize_(0)
        self.away = True

    def make_room(self) -> None:
        """Take device memory, with any contents."""
        self.storage.resize_(self.size_bytes)
        self.away = False

    def come(self) -> None:
        """Take device memory and bring the contents back."""
        self.make_room()
        for device, host in self._pairs():
            _copy(device, host)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self.storage)
        return list(zip(whole.split([piece.numel() for piece in self.host]), self.host, strict=True))


def leave(parked: Sequence[Parked], copy: bool = True) -> int:
    """Let those that are on the device leave it; returns their bytes. What was never on the host is always copied."""
    here = [each for each in parked if not each.away and each.size_bytes]
    fresh = [not each.host for each in here]
    if any(fresh):
        _make_host_memory([each for each, new in zip(here, fresh, strict=True) if new])
    with torch.no_grad():
        for each, new in zip(here, fresh, strict=True):
            each.leave(copy or new)
    return sum(each.size_bytes for each in here)


def come(parked: Sequence[Parked]) -> int:
    """Bring back those that wait on the host; returns their bytes."""
    away = [each for each in parked if each.away]
    with torch.no_grad():
        for each in away:
            each.come()
    return sum(each.size_bytes for each in away)


def unique(parked: Iterable[Parked]) -> list[Parked]:
    """Each once, in order."""
    return list(dict.fromkeys(parked))


def synchronise(parked: Iterable[Parked]) -> None:
    """Wait for the copies on the current stream of their device."""
    for device in {each.device for each in parked if each.device.type != "cpu"}:
        getattr(torch, device.type).current_stream(device).synchronize()


def _copy(to: torch.Tensor, source: torch.Tensor) -> None:
    to.copy_(source, non_blocking=True)
    TALLY.copies += 1
    TALLY.copied_bytes += source.numel()


def _make_host_memory(parked: Sequence[Parked]) -> None:
    """Pieces that several small storages share, and of which a large one takes several; pinned where there is a device.

    On a CPU each storage has pieces of its own: nothing rounds them up.
    """
    left = sum(-(-each.size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES for each in parked)
    piece, used = _allocate(0, parked[0].device), 0
    for each in parked:
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


class ModelPlaces:
    """Where the parameters and gradients of one model chunk go. `tenant`: actor_params in DDP, else ref_params."""

    def __init__(self, chunk: torch.nn.Module):
        from megatron.core.distributed import DistributedDataParallel

        in_ddp = isinstance(chunk, DistributedDataParallel)
        self.tenant = "actor_params" if in_ddp else "ref_params"
        self.weights = list(chunk.named_parameters())
        self.buffers = [(f"{kind}[{number}]", buffer) for kind in ("buffers", "expert_parallel_buffers")
                        for number, buffer in enumerate(getattr(chunk, kind))] if in_ddp else []  # fmt: skip
        self.params = _parked(self.tenant, self._param_tensors())
        self.grads = _parked("grads", self._grad_tensors())
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
    def away(self) -> bool:
        """Whether any parameters wait on the host."""
        return any(each.away for each in self.params.values())

    def load(self) -> int:
        """Parameters are on the device; returns the bytes that came."""
        _check(self.params, self._param_tensors())
        came = come(unique(self.params.values()))
        if came:
            self.written = False
            self.versions = {name: parameter._version for name, parameter in self.weights}
        return came

    def make_gradients(self) -> int:
        """Gradients are on the device, zero, and training may write to the parameters; returns the bytes that came."""
        _check(self.grads, self._grad_tensors())
        self.written = True
        away = [each for each in self.grads.values() if each.away]
        for each in away:
            each.make_room()
        with torch.no_grad():
            for _, tensor in self._grad_tensors():
                tensor.zero_()
        return sum(each.size_bytes for each in away)

    def offload(self) -> tuple[str, int]:
        """Parameters are off the device; returns how they went, copied (offload) or not (free), and the bytes."""
        _check(self.params, self._param_tensors())
        self._refuse_unknown_writes()
        written, self.written = self.written, False
        return "offload" if written else "free", leave(unique(self.params.values()), copy=written)

    def drop_gradients(self) -> int:
        """Gradients are not on the device; returns the bytes that went."""
        _check(self.grads, self._grad_tensors())
        here = [each for each in self.grads.values() if not each.away]
        for each in here:
            each.leave(copy=False)
        return sum(each.size_bytes for each in here)

    def _refuse_unknown_writes(self) -> None:
        """RecipeError for those that a parameter's version shows; which it does not show: the head of this file."""
        for name, parameter in self.weights:
            if not self.buffers and parameter.grad is not None:
                raise RecipeError(f"offload: {name} of a model without DDP has a gradient, which would stay on the "
                                 "device: expected none, as in a reference model")
            if not self.written and parameter._version != self.versions.get(name, parameter._version):
                raise RecipeError(
                    f"offload: {self.tenant}, {name}: expected the weights that came from the host, found them written "
                    "to although they were loaded for reading only (load_grad=False): the host copy is stale and would "
                    "undo that; load with load_grad=True before writing")


def _parked(tenant: str, tensors: Named) -> dict[str, Parked]:
    """{name: Parked}; names whose tensors share a storage (tied weights) share one."""
    by_storage: dict[int, Parked] = {}
    found = {}
    for name, tensor in tensors:
        key = tensor.untyped_storage()._cdata
        by_storage[key] = by_storage.get(key) or Parked(f"{tenant}, {name}", tensor)
        found[name] = by_storage[key]
    return found


def _check(parked: dict[str, Parked], tensors: Named) -> None:
    for name, tensor in tensors:
        parked[name].check(tensor)


def places_of_model(chunk: torch.nn.Module) -> ModelPlaces:
    """The places of one chunk, always the same."""
    if not hasattr(chunk, "recipe_places"):
        chunk.recipe_places = ModelPlaces(chunk)
    return chunk.recipe_places


_MAIN_GROUPS = ("shard_fp32_from_float16_groups", "fp32_from_float16_groups")


class OptimizerPlaces:
    """The places of one Megatron optimizer, by name; states are made in the first step and join when they are seen.

    ConfigError for an optimizer that has its own way to the host.
    """

    def __init__(self, megatron: Any):
        if type(megatron.optimizer).__name__ == "HybridDeviceOptimizer":
            raise ConfigError("offload: Megatron's optimizer_cpu_offload keeps part of this optimizer on the host by "
                              "itself: set actor.megatron.optimizer_offload=false")
        self.megatron = megatron
        self.swapped = False  # swap_optimizer.py brings pieces of it during a step, and nothing else does
        self.mains = {id(main) for name in _MAIN_GROUPS for group in getattr(megatron, name, ()) for main in group}
        self.parked: dict[str, Parked] = {}

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What the inner optimizer steps: main parameters, or fp32 ones of the model."""
        for number, group in enumerate(self.megatron.optimizer.param_groups):
            yield from ((f"group {number}, parameter {at}", parameter) for at, parameter in enumerate(group["params"]))

    def parked_of(self, name: str, parameter: torch.Tensor) -> list[Parked]:
        """Places of what is owned for one of `parameters`; RecipeError where it is not as it was left."""
        owned = [(f"{name}, main", parameter)] if id(parameter) in self.mains else []
        states = self.megatron.optimizer.state.get(parameter, {})
        owned += [(f"{name}, {key}", state) for key, state in states.items()
                  if isinstance(state, torch.Tensor) and state.dim()]  # fmt: skip
        return [self._place(*each) for each in owned]

    def _place(self, name: str, tensor: torch.Tensor) -> Parked:
        known = self.parked.get(name)
        if known is None:
            self.parked[name] = Parked(f"optimizer, {name}", tensor)
        elif not known.away and known.is_replaced_by(tensor):  # a checkpoint was loaded
            self.parked[name] = known.with_host_memory_for(tensor)
        else:
            known.check(tensor)
        return self.parked[name]

    def all(self) -> list[Parked]:
        """Every place there is now."""
        return [place for name, parameter in self.parameters() for place in self.parked_of(name, parameter)]

    @property
    def away(self) -> bool:
        """Whether any of it waits on the host."""
        return any(each.away for each in self.parked.values())

    def load(self) -> int:
        """All of it is on the device; returns the bytes that came."""
        return come(self.all())

    def offload(self) -> int:
        """None of it is on the device; returns the bytes that went."""
        return leave(self.all())


def places_of_optimizer(megatron: Any) -> OptimizerPlaces:
    """The places of one Megatron optimizer, always the same."""
    if not hasattr(megatron, "recipe_places"):
        megatron.recipe_places = OptimizerPlaces(megatron)
    return megatron.recipe_places


def single_optimizers(optimizers: Any) -> list[Any]:
    """The optimizers of a chain, or the one; without those that have nothing to train on this rank."""
    return [one for one in getattr(optimizers, "chained_optimizers", [optimizers]) if one.optimizer is not None]
