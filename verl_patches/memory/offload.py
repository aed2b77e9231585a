"""Offload and onload of Megatron models and optimizers, in place of verl's four functions (utils/megatron_utils.py).

Models in DDP: buffers of dense parameters and of routed experts; gradients are never copied, they go and come back as
zeros. What was loaded without gradients (log-probs, the reference) cannot have been trained: it is dropped, not copied
back, and an in-place write to such a parameter is refused, as far as it can be seen (model_places.py). Optimizers:
optimizer_places.py. Nothing here trims the allocator's pool but `trim_before_wake`: vLLM's sleep mode takes its memory
past the pool, nobody else does.

Where a worker has a conductor (conduct.py), it calls the functions of the first half, and verl's calls, which come by
the row providers, do nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_patches.memory import conduct
from verl_patches.memory.model_places import places_of_model
from verl_patches.memory.moves import move
from verl_patches.memory.optimizer_places import OptimizerPlaces, places_of_optimizer, single_optimizers
from verl_patches.memory.parking import synchronise
from verl_patches.memory.phase_clock import timed


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


# Row providers, in place of verl's functions but under their names, by which Ray pickles them; timed as verl's are.
# What the conductor moves, verl does not: a critic's model it does.


def load_model(original: Callable) -> Callable:
    """Row provider: load_megatron_model_to_gpu."""
    ours = timed("offload", load_megatron_model_to_gpu)

    @functools.wraps(original)
    def load(models: Sequence[torch.nn.Module], load_grad: bool = True) -> None:
        if not conduct.moved_here(models):
            ours(models, load_grad)

    return load


def offload_model(original: Callable) -> Callable:
    """Row provider: offload_megatron_model_to_cpu."""
    ours = timed("offload", offload_megatron_model_to_cpu)

    @functools.wraps(original)
    def offload(models: Sequence[torch.nn.Module]) -> None:
        if not conduct.moved_here(models):
            ours(models)

    return offload


def load_optimizer(original: Callable) -> Callable:
    """Row provider: load_megatron_optimizer."""
    ours = timed("offload", load_megatron_optimizer)

    @functools.wraps(original)
    def load(optimizers: Any) -> None:
        if not conduct.moved_here(optimizers):
            ours(optimizers)

    return load


def offload_optimizer(original: Callable) -> Callable:
    """Row provider: offload_megatron_optimizer."""
    ours = timed("offload", offload_megatron_optimizer)

    @functools.wraps(original)
    def offload(optimizers: Any) -> None:
        if not conduct.moved_here(optimizers):
            ours(optimizers)

    return offload


def trim_before_wake(wake_up: Callable) -> Callable:
    """Row provider for vLLM's LLM.wake_up, whose memory does not come from torch's pool: give back what lies there.

    A conductor does it where its order says so.
    """

    @functools.wraps(wake_up)
    def call(self: Any, tags: list[str] | None = None) -> Any:
        if conduct.current() is None:
            torch.cuda.empty_cache()
        return wake_up(self, tags)

    return call
