"""Static bytes of a training rank: weights, gradients and optimizer state, before any activation.

With n dense and m routed-expert trainable elements on the rank, as Megatron's distributed optimizer keeps them (bf16):
    param     = bytes of the weights: 2 (n + m), and 4 for each value of the correction bias
    grad      = 4 (n + m): fp32 main gradients, whole on every rank
    optimizer = 12 n / (dp * cp) + 12 m / edp: fp32 master weight and two Adam moments, sharded over the replicas
Swapping the optimizer to the host takes its term off the die. At TP4 PP8 EP32 on 256 dies this gives 54.99 GB on the
worst stage, and 20.32 GB with the optimizer swapped.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_patches.layout.inventory import Inventory
from verl_patches.layout.parallel import ParallelLayout
from verl_patches.layout.sharding import local_parameters

GRAD_BYTES = 4
OPTIMIZER_BYTES = 12


@dataclass(frozen=True)
class StaticBytes:
    """Bytes on one die, and the optimizer bytes that were moved to the host instead."""

    param_bytes: int
    grad_bytes: int
    optimizer_bytes: int
    host_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes on the die."""
        return self.param_bytes + self.grad_bytes + self.optimizer_bytes


def static_bytes(
    inventory: Inventory, layout: ParallelLayout, rank: int, library: str = "mindspeed", swap_optimizer: bool = False
) -> StaticBytes:
    """Static bytes of `rank` (formula above); optimizer shards are rounded up to whole elements.

    Raises ConfigError as `local_parameters` does.
    """
    held = local_parameters(inventory, layout, rank, library)
    dense = held.count(experts=False, trainable_only=True)
    routed = held.count(experts=True, trainable_only=True)
    optimizer = OPTIMIZER_BYTES * (-(-dense // (layout.dp * layout.cp)) + -(-routed // layout.edp))
    on_die, on_host = (0, optimizer) if swap_optimizer else (optimizer, 0)
    return StaticBytes(held.size_bytes(), GRAD_BYTES * (dense + routed), on_die, on_host)
