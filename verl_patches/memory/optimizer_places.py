"""Where what a Megatron optimizer owns goes: fp32 main parameters of 16-bit ones and all states but step counts.

DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer of megatron-core 0.8 and 0.12. fp32 parameters
have no main copy: their shards are views of the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from verl_patches.errors import ConfigError
from verl_patches.memory.parking import Parked, come, leave

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
