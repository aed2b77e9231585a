"""Rollout weights and KV cache of an engine with captured graphs, between two rollouts.

Graphs go on at the addresses that they captured (torchair: frozen_parameter, vllm_ascend model_runner_v1.py:1774), and
only vLLM's sleep mode brings memory back to those: it stays, but for its host copy of what the next weight sync writes
anyway. It moves whole segments of torch's allocator; one in which every living tensor is such a weight is given back as
those of the KV cache are. All others are copied as ever: buffers, expert maps, private NPU formats, what a weight
shares with them.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch

from verl_patches.memory.measure import vllm_worker
from verl_patches.memory.rollout_life import TAGS, WEIGHTS, Life, weights_of
from verl_patches.patching.engine import PatchError

_ALLOCATORS = (("vllm_ascend.device_allocator.camem", "CaMemAllocator"),
               ("vllm.device_allocator.cumem", "CuMemAllocator"))  # fmt: skip
_DROPPED = "weights that the next sync writes"  # sleep copies what has the tag `weights` only


class GraphLife(Life):
    """Sleep and wake of one engine by its own sleep mode; see the head of this file."""

    def __init__(self, llm: Any, loaded: bool = True):
        super().__init__(loaded)
        self._model = vllm_worker(llm).model_runner.model
        self._sleep, self._wake_up = llm.llm_engine.sleep, llm.llm_engine.wake_up
        self._asleep: set[str] = set()

    def sleep(self, level: int = 1) -> None:
        """vLLM's own. PatchError if its allocator is not there."""
        if self._weights_stay and level == 1:
            self._sleep(level)
        else:
            with dropped(_allocator().pointer_to_data, self._filled_alone()):
                self._sleep(level)
            self._lost = True
        self._asleep = set(TAGS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's own."""
        self._wake_up(tags)
        self._asleep -= set(TAGS if tags is None else tags)

    def _filled_alone(self) -> set[int]:
        weights = weights_of(self._model).values()
        addresses = {weight.untyped_storage().data_ptr() for weight in weights}
        return segments_of(_snapshot(next(iter(weights)).device), addresses)


def segments_of(snapshot: Iterable[Mapping[str, Any]], tensors: Collection[int]) -> set[int]:
    """Addresses of the segments in which nothing lives but `tensors`, addresses too.

    `snapshot`: torch's memory_snapshot. What is free but waits for a stream counts as living.
    """
    return {segment["address"] for segment in snapshot
            if {block["address"] for block in segment["blocks"] if block["state"] != "inactive"} <= set(tensors)}


@contextlib.contextmanager
def dropped(pieces: Mapping[int, Any], addresses: Collection[int]) -> Iterator[None]:
    """Meanwhile the `pieces` (vLLM's AllocationData by address) of weights at `addresses` are not copied by sleep."""
    ours = [piece for address, piece in pieces.items() if address in addresses and piece.tag == WEIGHTS]
    for piece in ours:
        piece.tag = _DROPPED
    try:
        yield
    finally:
        for piece in ours:
            piece.tag = WEIGHTS


def _snapshot(device: torch.device) -> Iterable[Mapping[str, Any]]:
    return torch.get_device_module(device).memory_snapshot()


def _allocator() -> Any:
    for module, name in _ALLOCATORS:
        found = getattr(getattr(sys.modules.get(module), name, None), "instance", None)
        if found is not None:
            return found
    raise PatchError(f"rollout: asked to sleep, expected {' or '.join(name for _, name in _ALLOCATORS)} of vLLM's "
                     "sleep mode, found neither: switch the row off, recipe.patches=[-memory.rollout_life]")
