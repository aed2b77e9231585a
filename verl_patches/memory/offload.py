"""Offload and onload of Megatron models and optimizers, and the handlers that the scheduler calls for them.

Models in DDP: buffers of dense parameters and of routed experts. Gradients are never copied: they are freed, and are
allocated again as zeros. Parameters that were loaded without gradients (log-probs, the reference) cannot have been
trained: they are freed, not copied back, and an in-place write to such a parameter is refused as far as it can be seen
(host_backed.py). Nothing here empties the allocator's cache: the schedule says where that is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from verl_patches.memory.counters import move
from verl_patches.memory.host_backed import (
    OptimizerOffloadState,
    offload_state_of_model,
    offload_state_of_optimizer,
    single_optimizers,
    synchronise,
)


def load_megatron_model_to_gpu(models: Sequence[torch.nn.Module], load_grad: bool = True) -> None:
    """Bring parameters of model chunks to the device, and zeroed gradients if `load_grad` and they are in DDP.

    RecipeError, naming the buffer, for a storage that is not the one that left or has another size.
    """
    for states in map(offload_state_of_model, models):
        with move("load", states.group) as moved:
            moved.bytes = states.load()
    if load_grad:
        make_gradients(models)
    _settle(models)


def offload_megatron_model_to_cpu(models: Sequence[torch.nn.Module]) -> None:
    """Take gradients and parameters of model chunks off the device. RecipeError as for loading, and for a stale copy.

    A stale copy is seen only where a parameter's version shows the write: see host_backed.py.
    """
    drop_gradients(models)
    offload_params(models)


def make_gradients(models: Sequence[torch.nn.Module]) -> None:
    """Zeroed gradients are on the device, and the parameters may be written to from now on."""
    for states in map(offload_state_of_model, models):
        with move("alloc", "grads") as moved:
            moved.bytes = states.make_gradients()


def drop_gradients(models: Sequence[torch.nn.Module]) -> None:
    """Take gradients off the device; nothing is copied."""
    for states in map(offload_state_of_model, models):
        with move("free", "grads") as moved:
            moved.bytes = states.drop_gradients()


def offload_params(models: Sequence[torch.nn.Module]) -> None:
    """Take parameters off the device, by a copy if they may have been written to since they came."""
    for states in map(offload_state_of_model, models):
        with move("offload", states.group) as moved:
            moved.verb, moved.bytes = states.offload()
    _settle(models)


def _settle(models: Sequence[torch.nn.Module]) -> None:
    synchronise(each for chunk in models for each in offload_state_of_model(chunk).params.values())


def load_megatron_optimizer(optimizers: Any) -> None:
    """Bring main parameters and states to the device. RecipeError as for models."""
    _each_optimizer("load", OptimizerOffloadState.load, optimizers)


def offload_megatron_optimizer(optimizers: Any) -> None:
    """Take main parameters and states off the device. RecipeError as for models."""
    _each_optimizer("offload", OptimizerOffloadState.offload, optimizers)


def _each_optimizer(verb: str, do: Callable[[OptimizerOffloadState], int], optimizers: Any) -> None:
    states = [offload_state_of_optimizer(one) for one in single_optimizers(optimizers)]
    with move(verb, "optimizer") as moved:
        moved.bytes = sum(map(do, states))
    synchronise(storages for each in states for storages in each.storages.values())


class Params:
    """actor_params or ref_params: parameters of `chunks`, without their gradients."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._chunks = chunks

    def load(self) -> None:
        """To the device."""
        load_megatron_model_to_gpu(self._chunks, load_grad=False)

    def offload(self) -> None:
        """Off the device; copied only if they may have been written to."""
        offload_params(self._chunks)

    free = offload


class Grads:
    """Gradients of `chunks`."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self._chunks = chunks

    def alloc(self) -> None:
        """On the device, zero; from now on parameters may be written to."""
        make_gradients(self._chunks)

    def free(self) -> None:
        """Off the device."""
        drop_gradients(self._chunks)


class Optimizer:
    """Main parameters and states."""

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer

    def load(self) -> None:
        """To the device."""
        load_megatron_optimizer(self._optimizer)

    def offload(self) -> None:
        """Off the device."""
        offload_megatron_optimizer(self._optimizer)


def actor_handlers(chunks: Sequence[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    """{memory group: handler} of an actor in DDP and its Megatron optimizer."""
    return {"actor_params": Params(chunks), "grads": Grads(chunks), "optimizer": Optimizer(optimizer)}


def reference_handlers(chunks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """{memory group: handler} of a reference model."""
    return {"ref_params": Params(chunks)}
