"""Tensors that stay on the device between the stages of a step, and their one exchange between ranks.

    cache.open(step)                                drops the tensors of an earlier step
    cache.put(step, "responses", samples, ragged)
    cache.redistribute(step, plan, rank, specs)     rollout ranks -> train replicas, one AlltoAllV of bytes
    cache.get(step, "responses", samples)
    cache.close()                                   drops all tensors

Values are by sample, without padding (token ids int32, log-probs fp32). Every call names its step, so that a stage
never uses tensors of another step. A stage of a worker runs inside `closed_by_error`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from verl_patches.errors import RecipeError
from verl_patches.step.batches.batch_plan import BatchPlan
from verl_patches.step.batches.exchange import Ragged, TensorSpec, exchange

log = logging.getLogger(__name__)


class CacheError(RecipeError):
    """The cache has no such tensor or samples, or is of another step; names step, tensor and samples."""


class TensorCache:
    """The tensors of one step on one rank."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._step: int | None = None
        self._tensors: dict[str, tuple[dict[int, int], Ragged]] = {}  # {name: ({sample: place}, values)}

    @property
    def bytes_held(self) -> int:
        """Device bytes of all tensors."""
        return sum(ragged.values.nbytes for _, ragged in self._tensors.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self._tensors)

    def open(self, step: int) -> None:
        """Begin `step`; tensors of a step that was not closed are dropped with a warning."""
        if self._tensors:
            text = "tensor cache: step %s begins but step %s was not closed: dropping %s (%d bytes)"
            log.warning(text, step, self._step, ", ".join(self._tensors), self.bytes_held)
        self.close()
        self._step = step

    def close(self) -> int:
        """End the step and drop its tensors; returns their bytes. Idempotent."""
        held = self.bytes_held
        self._tensors.clear()
        self._step = None
        return held

    @contextmanager
    def closed_by_error(self) -> Iterator[None]:
        """Close the cache if the code inside raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def put(self, step: int, name: str, samples: Sequence[int], ragged: Ragged) -> None:
        """Store a tensor of these samples, in this order; replaces one of that name."""
        self._check_open(step)
        if len(samples) != len(ragged.lengths):
            raise CacheError(f"tensor cache: {name} of {len(samples)} samples has {len(ragged.lengths)} lengths")
        places = {sample: place for place, sample in enumerate(samples)}
        if len(places) != len(samples):
            raise CacheError(f"tensor cache: {name} has a sample twice among {len(samples)}; expected each once")
        self._tensors[name] = places, ragged

    def get(self, step: int, name: str, samples: Sequence[int]) -> Ragged:
        """The values of these samples, in this order; without a copy if they were put in the same order."""
        self._check_open(step)
        places, ragged = self._tensors.get(name, ({}, None))
        missing = [sample for sample in samples if sample not in places]
        if missing or ragged is None:
            first = f", the first is {missing[0]}" if missing else ""
            raise CacheError(
                f"tensor cache: step {step} has no {name} of {len(missing)} samples{first}; it has {self._content()}. "
                "Was the stage that makes it left out?"
            )
        return ragged if list(places) == list(samples) else ragged.take([places[sample] for sample in samples])

    def redistribute(self, step: int, plan: BatchPlan, rank: int, specs: Mapping[str, TensorSpec]) -> None:
        """Replace the tensors of `specs` by those of the samples that `rank` computes by the plan; collective.

        A rank whose step or tensor is missing raises CacheError, the others ExchangeError; after an error the tensors
        of these names are dropped.
        """

        def held() -> dict[str, Ragged]:
            return {name: self.get(step, name, plan.held[rank]) for name in specs}

        try:
            moved = exchange(plan, rank, specs, held, step=step, device=self._device)
        finally:
            for name in specs:
                self._tensors.pop(name, None)
        for name, ragged in moved.items():
            self.put(step, name, plan.placed[plan.replica_of[rank]], ragged)

    def _check_open(self, step: int) -> None:
        if self._step != step:
            now = "no step is open" if self._step is None else f"step {self._step} is open"
            raise CacheError(f"tensor cache: expected step {step} to be open, but {now}; it has {self._content()}")

    def _content(self) -> str:
        contents = [f"{name} of {len(places)} samples" for name, (places, _) in self._tensors.items()]
        return ", ".join(contents) or "nothing"
