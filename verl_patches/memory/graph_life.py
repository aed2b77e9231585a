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

from verl_patches.errors import RecipeError
from verl_patches.memory.measure import vllm_worker
from verl_patches.memory.rollout_life import TAGS, WEIGHTS, Life, weights_of

_ALLOCATORS = (("vllm_ascend.device_allocator.camem", "CaMemAllocator"),
               ("vllm.device_allocator.cumem", "CuMemAllocator"))  # fmt: skip
_DROPPED = "weights that the next sync writes"  # sleep copies what has the tag `weights` only


class GraphLife(Life):
    """Sleep and wake of one engine, `llm`, by its own sleep mode; see the head of this file.

    Asking for what is so already does nothing: vLLM's executor forgets what it is asked while half of it is awake.
    """

    def __init__(self, llm: Any, loaded: bool = True):
        super().__init__(loaded)
        self._llm = llm
        self._sleep, self._wake_up = llm.llm_engine.sleep, llm.llm_engine.wake_up
        self._asleep: set[str] = set()

    def sleep(self, level: int = 1) -> None:
        """vLLM's own. RecipeError if its allocator is not there."""
        if self._asleep == set(TAGS):
            return
        self.wake_up()
        drop = level != 1 or not self._weights_stay
        pieces, addresses = (_allocator().pointer_to_data, self._filled_alone()) if drop else ({}, ())
        self._asleep, self._lost = set(TAGS), drop  # before: after an error inside nobody knows what is there
        with dropped(pieces, addresses):
            self._sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's own, of all or of vLLM's `tags`."""
        wanted = [tag for tag in TAGS if tag in self._asleep and (tags is None or tag in tags)]
        if wanted:
            self._wake_up(wanted)
            self._asleep -= set(wanted)

    def _filled_alone(self) -> set[int]:
        weights = weights_of(vllm_worker(self._llm).model_runner.model).values()
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
    module = torch.get_device_module(device.type)
    module.synchronize()  # vLLM unmaps without waiting; where it copies nothing, that does not wait either
    return module.memory_snapshot()


def _allocator() -> Any:
    for module, name in _ALLOCATORS:
        found = getattr(getattr(sys.modules.get(module), name, None), "instance", None)
        if found is not None:
            return found
    raise RecipeError(f"rollout: asked to sleep, expected {' or '.join(name for _, name in _ALLOCATORS)} of vLLM's "
                      "sleep mode, found neither: switch the row off, recipe.patches=[-memory.rollout_life]")
