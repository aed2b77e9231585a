"""Movers (conduct.py) of the tenants that training has: what an order's verbs do with Megatron's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_patches.memory import offload


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
