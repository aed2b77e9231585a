"""Keep tensors on the device between the stages of a step, and exchange them once between ranks.

    cache.put("responses", samples, ragged)
    cache.redistribute(plan, rank, specs)     rollout ranks -> train replicas, an AlltoAllV of each tensor
    cache.get("responses", samples)
    cache.close()                             drops all tensors: before a step, after it, and in take_report

Values are stored by sample, without padding (token ids int32, log-probs fp32).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from verl_patches.errors import RecipeError
from verl_patches.step.batches.batch_plan import BatchPlan
from verl_patches.step.batches.exchange import RaggedTensor, TensorSpec, exchange


class TensorCache:
    """Hold the tensors of one step on one rank."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._tensors: dict[str, tuple[dict[int, int], RaggedTensor]] = {}  # {name: ({sample: place}, values)}

    @property
    def bytes_held(self) -> int:
        """Return the device bytes of all tensors."""
        return sum(ragged.values.nbytes for _, ragged in self._tensors.values())

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all tensors."""
        return tuple(self._tensors)

    def close(self) -> None:
        """Drop all tensors. Idempotent."""
        self._tensors.clear()

    def put(self, name: str, samples: Sequence[int], ragged: RaggedTensor) -> None:
        """Store a tensor of these samples, in this order; replace an earlier one of that name."""
        places = {sample: place for place, sample in enumerate(samples)}
        assert len(places) == len(samples) == len(ragged.lengths), (name, samples, ragged.lengths)
        self._tensors[name] = places, ragged

    def get(self, name: str, samples: Sequence[int]) -> RaggedTensor:
        """Return the values of these samples, in this order; without a copy if they were put in the same order."""
        places, ragged = self._tensors.get(name, ({}, None))
        missing = [sample for sample in samples if sample not in places]
        if missing or ragged is None:
            first = f" (the first is sample {missing[0]})" if missing else ""
            contents = [f"{name} of {len(places)} samples" for name, (places, _) in self._tensors.items()]
            raise RecipeError(
                f"tensor cache: {len(missing)} samples have no {name}{first}; the cache has "
                f"{', '.join(contents) or 'no tensors'}. The stage that puts it there must run before"
            )
        return ragged if list(places) == list(samples) else ragged.take([places[sample] for sample in samples])

    def redistribute(self, plan: BatchPlan, rank: int, specs: Mapping[str, TensorSpec]) -> None:
        """Replace the tensors of `specs` by those of the samples that `rank` computes by the plan; collective.

        If a tensor is missing on one rank, all ranks raise ExchangeError; after an error the tensors of these names are
        dropped.
        """

        def planned_tensors() -> dict[str, RaggedTensor]:
            return {name: self.get(name, plan.rollout_samples[rank]) for name in specs}

        try:
            moved = exchange(plan, rank, specs, planned_tensors, device=self._device)
        finally:
            for name in specs:
                self._tensors.pop(name, None)
        for name, ragged in moved.items():
            self.put(name, plan.replica_samples[plan.replica_by_rank[rank]], ragged)
