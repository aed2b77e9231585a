"""Define the payloads that trainer and workers exchange in the stages of recipe.tensor_cache; Ray pickles all of them.

The signatures of RecipeWorker (worker/recipe_worker.py) tell which stage has which payload. A sample is identified by
its place in the batch as it was generated. P prompts, B samples, b samples of one rank or replica, T their tokens.
Arrays that arrive from Ray are read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class PromptIds:
    """Hold the prompts of all ranks, in order of ranks.

    ids: int32 [T], concatenated without padding; lengths: int32 [P]; seeds: int64 [P], or None without rollout.seed;
    width, pad_id: of the padded prompts; meta: verl's meta_info.
    """

    ids: np.ndarray
    lengths: np.ndarray
    seeds: np.ndarray | None
    width: int
    pad_id: int
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class ResponseIds:
    """Hold the responses of one rank; lengths: int32 [b]; ids: uint8 [T, 3], made by packed_ids of exchange.py."""

    lengths: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Placement:
    """Hold the facts from which every rank computes the plan of the batch (batch_plan.py).

    prompt_lengths, response_lengths: int32 [B], by sample; widths: of padded prompts and responses; balance_batch:
    whether replicas get equally long micro batches (trainer.balance_batch).
    """

    prompt_lengths: np.ndarray
    response_lengths: np.ndarray
    widths: tuple[int, int]
    pad_id: int
    balance_batch: bool


@dataclass(frozen=True)
class LogProbs:
    """Hold the log-prob results of one replica, in the order of `samples`, int32 [b].

    entropy: float32 [b], the mean of each sample, None for the reference; values: float32 [T], log-probs without
    padding, None unless they were requested.
    """

    samples: np.ndarray
    entropy: np.ndarray | None
    values: np.ndarray | None


@dataclass(frozen=True)
class Advantages:
    """Hold advantages in the order of samples: float32 [B], or [T] for each response token if `per_token`.

    meta: verl's meta_info of the batch.
    """

    values: np.ndarray
    per_token: bool
    meta: Mapping[str, Any]
