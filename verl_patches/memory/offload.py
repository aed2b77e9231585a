"""Offload and onload of Megatron models and optimizers, in place of verl's four functions (utils/megatron_utils.py).

Models in DDP: buffers of dense parameters and of routed experts; gradients are never copied, they go and come back as
zeros. What was loaded without gradients (log-probs, the reference) cannot have been trained: it is dropped, not copied
back, and an in-place write to such a parameter is refused, as far as it can be seen (model_places.py). Optimizers:
optimizer_places.py. Nothing here trims the allocator's pool but `trim_before_wake`: vLLM's sleep mode takes its memory
past the pool, nobody else does.

Where a worker has a conductor (conduct.py), it calls the functions of the first half, and verl's calls, which come by
the row providers, do nothing.

Movers (conduct.py) of the tenants that training has: what an order's verbs do with Megatron's objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_patches.memory import offload
from verl_patches.memory.counters import move
from verl_patches.memory.host_backed import (
    OptimizerPlaces,
    places_of_model,
    places_of_optimizer,
    single_optimizers,
    synchronise,
)


def load_megatron_model_to_gpu(models: Sequence[torch.nn.Module], load_grad: bool = True) -> None:
    """Bring parameters of model chunks to the device, and zeroed gradients if `load_grad` and they are in DDP.

    RecipeError, naming the buffer, for a storage that is not the one that left or has another size.
    """
    for places in map(places_of_model, models):
        with move("load", places.tenant) as moved:
            moved.bytes = places.load()
    if load_grad:
        make_gradients(models)
    _settle(models)


def offload_megatron_model_to_cpu(models: Sequence[torch.nn.Module]) -> None:
    """Take gradients and parameters of model chunks off the device. RecipeError as for loading, and for a stale copy.

    A stale copy is seen only where a parameter's version shows the write: see model_places.py.
    """
    drop_gradients(models)
    offload_params(models)


def make_gradients(models: Sequence[torch.nn.Module]) -> None:
    """Zeroed gradients are on the device, and the parameters may be written to from now on."""
    for places in map(places_of_model, models):
        with move("alloc", "grads") as moved:
            moved.bytes = places.make_gradients()


def drop_gradients(models: Sequence[torch.nn.Module]) -> None:
    """Take gradients off the device; nothing is copied."""
    for places in map(places_of_model, models):
        with move("free", "grads") as moved:
            moved.bytes = places.drop_gradients()


def offload_params(models: Sequence[torch.nn.Module]) -> None:
    """Take parameters off the device, by a copy if they may have been written to since they came."""
    for places in map(places_of_model, models):
        with move("offload", places.tenant) as moved:
            moved.verb, moved.bytes = places.offload()
    _settle(models)


def _settle(models: Sequence[torch.nn.Module]) -> None:
    synchronise(each for chunk in models for each in places_of_model(chunk).params.values())


def load_megatron_optimizer(optimizers: Any) -> None:
    """Bring main parameters and states to the device. RecipeError as for models."""
    _each_optimizer("load", OptimizerPlaces.load, optimizers)


def offload_megatron_optimizer(optimizers: Any) -> None:
    """Take main parameters and states off the device. RecipeError as for models."""
    _each_optimizer("offload", OptimizerPlaces.offload, optimizers)


def _each_optimizer(verb: str, do: Callable[[OptimizerPlaces], int], optimizers: Any) -> None:
    places = [places_of_optimizer(one) for one in single_optimizers(optimizers)]
    with move(verb, "optimizer") as moved:
        moved.bytes = sum(map(do, places))
    synchronise(parked for each in places for parked in each.parked.values())


class Params:
    """actor_params or ref_params: parameters of `chunks`, without their gradients."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self.of = chunks

    def load(self) -> None:
        """To the device."""
        offload.load_megatron_model_to_gpu(self.of, load_grad=False)

    def offload(self) -> None:
        """Off the device; copied only if they may have been written to."""
        offload.offload_params(self.of)

    free = offload


class Grads:
    """Gradients of `chunks`."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self.of = chunks

    def alloc(self) -> None:
        """On the device, zero; from now on parameters may be written to."""
        offload.make_gradients(self.of)

    def free(self) -> None:
        """Off the device."""
        offload.drop_gradients(self.of)


class Optimizer:
    """Main parameters and states."""

    def __init__(self, optimizer: Any):
        self.of = optimizer

    def load(self) -> None:
        """To the device."""
        offload.load_megatron_optimizer(self.of)

    def offload(self) -> None:
        """Off the device."""
        offload.offload_megatron_optimizer(self.of)


def movers_of(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """{tenant: mover} of an actor in DDP and its Megatron optimizer."""
    return {"actor_params": Params(chunks), "grads": Grads(chunks), "optimizer": Optimizer(optimizer)}


def movers_of_reference(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """{tenant: mover} of a reference model."""
    return {"ref_params": Params(chunks)}
