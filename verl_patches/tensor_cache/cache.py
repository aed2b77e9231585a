"""Tensors that stay on the device from one stage of a step to the next, and the one exchange that moves them.

    cache.open(step)                                a scope; what an earlier one left is dropped
    cache.put(step, "responses", samples, ragged)
    cache.redistribute(step, plan, rank, specs)      rollout ranks -> train replicas, one AlltoAllV of bytes
    cache.get(step, "responses", samples)
    cache.close()                                   nothing is left

Values are kept without padding (token ids as int32, log-probs as fp32), by sample. Every call names its step, so that a
stage never takes what another step left. A worker's calls come one by one: `open` and `close` are for them, with
`closed_by_error` around each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from verl_patches.errors import RecipeError
from verl_patches.tensor_cache.batch_plan import BatchPlan
from verl_patches.tensor_cache.exchange import Ragged, TensorSpec, exchange

log = logging.getLogger(__name__)


class CacheError(RecipeError):
    """What was asked for is not in the cache, or the cache is of another step; names step, tensor and samples."""


@dataclass
class _Kept:
    samples: tuple[int, ...]
    place: dict[int, int]
    ragged: Ragged


class TensorCache:
    """The tensors of one step on one rank."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._step: int | None = None
        self._kept: dict[str, _Kept] = {}

    @property
    def bytes_held(self) -> int:
        """Device bytes of what is kept now."""
        return sum(kept.ragged.values.nbytes for kept in self._kept.values())

    @property
    def names(self) -> tuple[str, ...]:
        """What is kept now."""
        return tuple(self._kept)

    def open(self, step: int) -> None:
        """Begin the scope of `step`; what another scope left is dropped, and said."""
        if self._kept:
            log.warning(
                "tensor cache: step %s begins but step %s was not closed: dropping %s (%d bytes)",
                step,
                self._step,
                ", ".join(self._kept),
                self.bytes_held,
            )
        self.close()
        self._step = step

    def close(self) -> int:
        """End the scope, if there is one; returns the bytes that it held."""
        held = self.bytes_held
        self._kept.clear()
        self._step = None
        return held

    @contextmanager
    def closed_by_error(self) -> Iterator[None]:
        """A stage of an open scope: an error in it ends the scope, its end does not."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def put(self, step: int, name: str, samples: Sequence[int], ragged: Ragged) -> None:
        """Keep a tensor of these samples, in this order; one of that name is replaced."""
        self._check_open(step)
        if len(samples) != len(ragged.lengths):
            raise CacheError(f"tensor cache: {name} of {len(samples)} samples has {len(ragged.lengths)} lengths")
        place = {sample: at for at, sample in enumerate(samples)}
        if len(place) != len(samples):
            raise CacheError(f"tensor cache: {name} has a sample twice among {len(samples)}; expected each once")
        self._kept[name] = _Kept(tuple(samples), place, ragged)

    def get(self, step: int, name: str, samples: Sequence[int]) -> Ragged:
        """The values of these samples, in this order; a view of what is kept where the order is the kept one."""
        self._check_open(step)
        kept = self._kept.get(name)
        missing = samples if kept is None else [sample for sample in samples if sample not in kept.place]
        if missing:
            raise CacheError(
                f"tensor cache: step {step} has no {name} of {len(missing)} samples, the first is {missing[0]}; it "
                f"keeps {self._content()}. Was the stage that makes it left out?"
            )
        return kept.ragged if kept.samples == tuple(samples) else kept.ragged.take([kept.place[s] for s in samples])

    def redistribute(
        self, step: int, plan: BatchPlan, rank: int, specs: Mapping[str, TensorSpec], group: object = None
    ) -> None:
        """Bring the tensors of `specs` from where rollout left them to where the plan computes them; collective.

        They replace those of these names. Where a rank cannot (its step or a tensor is missing), that rank raises
        CacheError and the others ExchangeError; what was kept under these names is gone then.
        """

        def held() -> dict[str, Ragged]:
            return {name: self.get(step, name, plan.held[rank]) for name in specs}

        try:
            moved = exchange(plan, rank, specs, held, step=step, device=self._device, group=group)
        finally:
            for name in specs:
                self._kept.pop(name, None)
        for name, ragged in moved.items():
            self.put(step, name, plan.placed[plan.replica_of[rank]], ragged)

    def _check_open(self, step: int) -> None:
        if self._step != step:
            now = "no step is open" if self._step is None else f"step {self._step} is open"
            raise CacheError(f"tensor cache: asked for step {step}, but {now}; it keeps {self._content()}")

    def _content(self) -> str:
        return ", ".join(f"{name} of {len(kept.samples)} samples" for name, kept in self._kept.items()) or "nothing"
