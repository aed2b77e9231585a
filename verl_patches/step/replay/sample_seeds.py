"""Draw a seed for each prompt of a step, with actor_rollout_ref.rollout.seed.

verl gives every request of every step the same seed. Here a prompt's seed depends on rollout.seed, on the step, on
whether the step validates, and on the prompt's place in the step's batches. So the samples are equal after a resume and
in any layout, up to rounding of logits. The seeds are a column of the batch, which goes with the prompts to any rank.
vLLM adds i to the seed for response i of a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from verl import DataProto

SEEDS = "sample_seeds"  # [P] int64; absent without rollout.seed


class SampleSeeds:
    """Draw the seeds of a run with actor_rollout_ref.rollout.seed=`seed`."""

    def __init__(self, seed: int):
        self._seed, self._drawn = seed, (-1, False, 0)  # last: step, whether it validates, number of the batch

    def seeded(self, prompts: DataProto, step: int) -> DataProto:
        """Return `prompts`, the next batch of `step`, with SEEDS; filter_groups and validations have several."""
        validates, (last_step, last_validates, number) = bool(prompts.meta_info.get("validate")), self._drawn
        self._drawn = step, validates, number + 1 if (step, validates) == (last_step, last_validates) else 0
        drawn = np.random.SeedSequence(self._seed, spawn_key=self._drawn).generate_state(len(prompts), np.uint64)
        batch = prompts.batch.copy()
        batch[SEEDS] = torch.from_numpy((drawn >> 1).astype(np.int64))
        return DataProto(batch, prompts.non_tensor_batch, prompts.meta_info)


def seeded_params(params: Any, seeds: Sequence[int]) -> Any:
    """Return a copy of vLLM's SamplingParams `params` for each prompt, with its seed; `params` if they are greedy."""
    if not params.temperature:
        return params
    each = [params.clone() for _ in seeds]
    for own, seed in zip(each, seeds, strict=True):
        own.seed = seed
    return each
