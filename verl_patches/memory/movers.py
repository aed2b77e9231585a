"""Movers (conduct.py) of the tenants that training has: what an order's verbs do with Megatron's objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from verl_patches.memory import offload


class Params:
    """actor_params or ref_params: parameters of `chunks`, without their gradients."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self.chunks = chunks

    def load(self) -> None:
        """To the device."""
        offload.load_megatron_model_to_gpu(self.chunks, load_grad=False)

    def offload(self) -> None:
        """Off the device; copied only if they may have been written to."""
        offload.offload_params(self.chunks)

    free = offload


class Grads:
    """Gradients of `chunks`."""

    def __init__(self, chunks: Sequence[torch.nn.Module]):
        self.chunks = chunks

    def alloc(self) -> None:
        """On the device, zero; from now on parameters may be written to."""
        offload.make_gradients(self.chunks)

    def free(self) -> None:
        """Off the device."""
        offload.drop_gradients(self.chunks)


class Optimizer:
    """Main parameters and states."""

    def __init__(self, optimizer: Any):
        self.optimizer = optimizer

    def load(self) -> None:
        """To the device."""
        offload.load_megatron_optimizer(self.optimizer)

    def offload(self) -> None:
        """Off the device."""
        offload.offload_megatron_optimizer(self.optimizer)


def movers_of(
    chunks: Sequence[torch.nn.Module], optimizer: Any, reference: Sequence[torch.nn.Module] = ()
) -> dict[str, Any]:
    """{tenant: mover} of an actor in DDP, its Megatron optimizer, and a reference model if the rank has one."""
    found = {"actor_params": Params(chunks), "grads": Grads(chunks), "optimizer": Optimizer(optimizer)}
    return {**found, "ref_params": Params(reference)} if reference else found
