"""Where the parameters and gradients of one Megatron model chunk go, and what they must be like when they come back.

Parameters that were loaded for reading only are dropped, not copied back. Whether somebody has written to them all the
same is asked of each parameter's version, which autograd counts: an in-place operation on the parameter itself is seen.
Writes past it are not, and are lost: through `.data`, through param_data, by a collective (dist.broadcast). Who writes
like that loads with load_grad=True before, or says so (checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from verl_patches.errors import RecipeError
from verl_patches.memory.parking import Parked, come, leave, unique

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
