"""The optimizer's step in pieces: states live on the host, one piece at a time is on the device. For line pypi.

A piece is whole parameters: at most the share that `recipe.train.swap_optimizer_times` pieces have, but never less than
the largest parameter, as MindSpeed cuts them on line a3 (mindspeed/core/optimizer/swap_optimizer.py). Each piece is
loaded, stepped by the optimizer's own step, written to its model parameters and offloaded; values are those of an
unswapped step, bit for bit, because Adam computes element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_patches.errors import ConfigError
from verl_patches.memory.counters import move
from verl_patches.memory.host_backed import (
    HostBackedStorage,
    load_storages,
    offload_state_of_optimizer,
    offload_storages,
    single_optimizers,
    synchronise,
)

_MOMENTS = 2  # Adam's
Named = list[tuple[str, torch.Tensor]]


class SwappedOptimizer:
    """One Megatron DistributedOptimizer whose step is swapped; it replaces the methods involved.

    ConfigError, naming it, for an optimizer that cannot be swapped, and for `times` below 1.
    """

    def __init__(self, megatron: Any, times: int, look: Callable[[], None] = lambda: None):
        _refuse(megatron, times)
        self.megatron, self.inner, self._look = megatron, megatron.optimizer, look
        self.states = offload_state_of_optimizer(megatron)
        self.states.swapped = True
        self.models = {
            id(main): model for mains, models in _pairs(megatron) for main, model in zip(mains, models, strict=True)
        }
        self.pieces, self.limit_bytes = self._cut(times)
        self._step, self._written = self.inner.step, False
        self._write_models = megatron._copy_main_params_to_model_params
        self._read_models = megatron._copy_model_params_to_main_params
        self.inner.step = self.step
        megatron._copy_main_params_to_model_params = self.write_models
        megatron._copy_model_params_to_main_params = self.read_models
        with move("offload", "optimizer") as moved:
            moved.bytes = self.states.offload()
        synchronise(self.states.storages.values())

    def _cut(self, times: int) -> tuple[list[Named], int]:
        named = list(self.states.parameters())
        costs = [4 * parameter.numel() * (_MOMENTS + (id(parameter) in self.states.mains)) for _, parameter in named]
        limit = max([-(-sum(costs) // times), *costs])
        pieces: list[Named] = []
        used = limit + 1
        for each, cost in zip(named, costs, strict=True):
            if used + cost > limit:
                pieces.append([])
                used = 0
            pieces[-1].append(each)
            used += cost
        return pieces, limit

    def step(self) -> None:
        """The inner optimizer's step."""
        counts = [group.get("step") for group in self.inner.param_groups]
        after = list(counts)
        for piece in self.pieces:
            with move("load", "optimizer") as moved:
                moved.bytes = load_storages(self._storages(piece))
            with self._only(piece):
                for group, count in zip(self.inner.param_groups, counts, strict=True):
                    _set_count(group, count)
                self._step()
                self._write_models()
                for at, group in enumerate(self.inner.param_groups):
                    after[at] = group.get("step") if group["params"] else after[at]
            self._look()
            here = self._storages(piece)  # with the states that a first step has made
            with move("offload", "optimizer") as moved:
                moved.peak_bytes = sum(each.size_bytes for each in self.states.storages.values() if not each.offloaded)
                moved.bytes = offload_storages(here)
        for group, count in zip(self.inner.param_groups, after, strict=True):
            _set_count(group, count)
        self._written = True
        synchronise(self.states.storages.values())

    def write_models(self) -> None:
        """The copy of main parameters to the model's, which each piece of a step has done already."""
        if not self._written:
            self._with_all_on_device(self._write_models)
        self._written = False

    def read_models(self) -> None:
        """The copy of the model's parameters to the main ones (reload_model_params), for which all are loaded."""
        self._with_all_on_device(self._read_models)

    def _with_all_on_device(self, do: Callable[[], None]) -> None:
        self.states.load()
        do()
        self.states.offload()
        synchronise(self.states.storages.values())

    def _storages(self, piece: Named) -> list[HostBackedStorage]:
        return [each for name, parameter in piece for each in self.states.storages_of(name, parameter)]

    @contextmanager
    def _only(self, piece: Named) -> Iterator[None]:
        """Meanwhile the optimizer has no other parameters, and Megatron writes no other 16-bit ones."""
        megatron, chosen = self.megatron, {id(parameter) for _, parameter in piece}
        groups = [group["params"] for group in self.inner.param_groups]
        lists = {name: getattr(megatron, name) for name in _LISTS}
        mains = [parameter for _, parameter in piece if id(parameter) in self.models]
        try:
            for group in self.inner.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
            megatron.shard_fp32_from_float16_groups = [mains]
            megatron.model_float16_groups = [[self.models[id(main)] for main in mains]]
            megatron.shard_fp32_groups = megatron.model_fp32_groups = []  # views of the model's own
            yield
        finally:
            for group, parameters in zip(self.inner.param_groups, groups, strict=True):
                group["params"] = parameters
            for name, value in lists.items():
                setattr(megatron, name, value)


_LISTS = ("shard_fp32_from_float16_groups", "model_float16_groups", "shard_fp32_groups", "model_fp32_groups")


def _pairs(megatron: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    return zip(megatron.shard_fp32_from_float16_groups, megatron.model_float16_groups, strict=True)


def _set_count(group: dict[str, Any], count: int | None) -> None:
    """apex's and Transformer Engine's FusedAdam count steps by group, once a call; torch's Adam by parameter."""
    if count is None:
        group.pop("step", None)
    else:
        group["step"] = count


def _refuse(megatron: Any, times: int) -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    inner, config = megatron.optimizer, megatron.config
    adam = isinstance(inner, torch.optim.Adam) or type(inner).__name__ == "FusedAdam"
    faults = [
        (not isinstance(megatron, DistributedOptimizer), f"{type(megatron).__name__} is no DistributedOptimizer"),
        (not adam, f"{type(inner).__name__} is none of Adam, AdamW, FusedAdam"),
        (
            any(group.get("capturable") or group.get("amsgrad") for group in getattr(inner, "param_groups", ())),
            "capturable or amsgrad is set",
        ),
        (any(getattr(config, name, False) for name in _NOT_SWAPPED), f"one of {', '.join(_NOT_SWAPPED)} is set"),
        (times < 1, f"swap_optimizer_times is {times}, expected at least 1"),
    ]
    said = [text for wrong, text in faults if wrong]
    if said:
        raise ConfigError(
            f"recipe.train.swap_optimizer cannot swap: {'; '.join(said)}; set it to false: "
            "actor.megatron.optimizer_offload=true takes states off the device between updates"
        )


_NOT_SWAPPED = ("use_precision_aware_optimizer", "optimizer_cpu_offload", "overlap_param_gather_with_optimizer_step")


def swap_optimizer(optimizers: Any, times: int, look: Callable[[], None] = lambda: None) -> list[SwappedOptimizer]:
    """Swap each optimizer of a chain, or the one; their pieces never are on the device together.

    `look` is called while a piece is on the device: the ledger's.
    """
    return [SwappedOptimizer(one, times, look) for one in single_optimizers(optimizers)]
