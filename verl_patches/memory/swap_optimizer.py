"""Optimizer step in pieces for line pypi: states are on the host, one piece at a time is loaded to the device.

A piece is a list of whole parameters. It is at most the optimizer's bytes over `recipe.train.swap_optimizer_times`, but
at least the largest parameter, as in mindspeed/core/optimizer/swap_optimizer.py on line a3. Each piece is loaded,
stepped by the optimizer's own step, written to its model parameters and offloaded. The values equal those of an
unswapped step bit for bit, because Adam computes element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl_patches.memory.counters import move
from verl_patches.memory.host_backed import (
    HostBackedStorage,
    load_storages,
    offload_state_of_optimizer,
    offload_storages,
    single_optimizers,
    synchronise,
)
from verl_patches.memory.measure import MOMENTS

_GROUPS = ("shard_fp32_from_float16_groups", "model_float16_groups", "shard_fp32_groups", "model_fp32_groups")
Named = list[tuple[str, torch.Tensor]]


def swap_optimizer(
    optimizers: Any, times: int, raise_peak: Callable[[], None] = lambda: None
) -> list[SwappedOptimizer]:
    """Swap one optimizer, or each of a chain; pieces of two optimizers are never on the device together.

    `raise_peak` is called while a piece is on the device (the ledger's).
    """
    return [SwappedOptimizer(one, times, raise_peak) for one in single_optimizers(optimizers)]


class SwappedOptimizer:
    """One Megatron DistributedOptimizer whose step is swapped: replaces `step` and the copies from and to the model.

    On line pypi verl makes no other one: with torch's AdamW or FusedAdam of apex or Transformer Engine.
    """

    def __init__(self, megatron: Any, times: int, raise_peak: Callable[[], None]):
        self.megatron, self.inner, self._raise_peak = megatron, megatron.optimizer, raise_peak
        self.states = offload_state_of_optimizer(megatron)
        self.states.swapped = True
        groups = zip(megatron.shard_fp32_from_float16_groups, megatron.model_float16_groups, strict=True)
        self.models = {id(main): model for pair in groups for main, model in zip(*pair, strict=True)}
        self.pieces, self.limit_bytes = self._cut(times)
        self._written = False  # whether a step has copied the main parameters to the model
        self._step, self.inner.step = self.inner.step, self.step
        self._write_models = megatron._copy_main_params_to_model_params
        self._read_models = megatron._copy_model_params_to_main_params
        megatron._copy_main_params_to_model_params = self.write_models
        megatron._copy_model_params_to_main_params = self.read_models
        with move("offload", self.states.group) as moved:
            moved.bytes = self.states.offload()
        self._synchronise()

    def _cut(self, times: int) -> tuple[list[Named], int]:
        """(pieces, most bytes of one)."""
        named = list(self.states.parameters())
        costs = [4 * tensor.numel() * (len(MOMENTS) + (id(tensor) in self.states.mains)) for _, tensor in named]
        limit = max([-(-sum(costs) // times), *costs])
        pieces: list[Named] = []
        used = limit + 1
        for parameter, cost in zip(named, costs, strict=True):
            if used + cost > limit:
                pieces.append([])
                used = 0
            pieces[-1].append(parameter)
            used += cost
        return pieces, limit

    def step(self) -> None:
        """The inner optimizer's step, piece by piece."""
        groups = self.inner.param_groups
        before = [group.get("step") for group in groups]
        after = list(before)
        for piece in self.pieces:
            with move("load", self.states.group) as moved:
                moved.bytes = load_storages(self._storages(piece))
            with self._only(piece):
                self._set_counts(before)
                self._step()
                self._write_models()
                after = [group.get("step") if group["params"] else n for group, n in zip(groups, after, strict=True)]
            self._raise_peak()
            storages = self._storages(piece)  # with the states that a first step has made
            with move("offload", self.states.group) as moved:
                moved.peak_bytes = sum(s.size_bytes for s in self.states.storages.values() if not s.offloaded)
                moved.bytes = offload_storages(storages)
        self._set_counts(after)
        self._written = True
        self._synchronise()

    def _set_counts(self, counts: list[int | None]) -> None:
        """FusedAdam of apex and Transformer Engine counts steps by group, once a call; torch's Adam by parameter."""
        for group, count in zip(self.inner.param_groups, counts, strict=True):
            if count is None:
                group.pop("step", None)
            else:
                group["step"] = count

    def write_models(self) -> None:
        """Copy the main parameters to the model's, unless a step has just done it."""
        if not self._written:
            self._with_all_on_device(self._write_models)
        self._written = False

    def read_models(self) -> None:
        """Copy the model's parameters to the main ones (reload_model_params)."""
        self._with_all_on_device(self._read_models)

    def _with_all_on_device(self, copy: Callable[[], None]) -> None:
        self.states.load()
        copy()
        self.states.offload()
        self._synchronise()

    def _synchronise(self) -> None:
        synchronise(self.states.storages.values())

    def _storages(self, piece: Named) -> list[HostBackedStorage]:
        return [storage for name, parameter in piece for storage in self.states.storages_of(name, parameter)]

    @contextmanager
    def _only(self, piece: Named) -> Iterator[None]:
        """Inside, the optimizer has the piece's parameters only, and Megatron writes only their model parameters."""
        megatron, groups, chosen = self.megatron, self.inner.param_groups, {id(parameter) for _, parameter in piece}
        params, lists = [group["params"] for group in groups], {name: getattr(megatron, name) for name in _GROUPS}
        mains = [parameter for _, parameter in piece if id(parameter) in self.models]
        try:
            for group in groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) in chosen]
            megatron.shard_fp32_from_float16_groups = [mains]
            megatron.model_float16_groups = [[self.models[id(main)] for main in mains]]
            megatron.shard_fp32_groups = megatron.model_fp32_groups = []  # views of the model's own
            yield
        finally:
            for group, parameters in zip(groups, params, strict=True):
                group["params"] = parameters
            for name, value in lists.items():
                setattr(megatron, name, value)
