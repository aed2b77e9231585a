"""Does the rollout engine hold the actor's weights? Compare both log-probs of the very tokens that were sampled.

Valid at temperature 1 with top-p and top-k off, where vLLM's sampled log-prob and the actor's are the same quantity. In
fp32 right weights give about 1e-6 and wrong ones above 0.1, so one number per step separates them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

MEAN, MAX = "recipe/logprob_delta_mean", "recipe/logprob_delta_max"


class WeightSyncError(RuntimeError):
    """vLLM's and the actor's log-probs of the same tokens differ by more than the limit."""


def logprob_delta(rollout_log_probs: Any, actor_log_probs: Any, response_mask: Any) -> dict[str, float]:
    """{mean, max} of |rollout - actor| over valid response tokens; all three [B, S_response]; nats."""
    delta = (rollout_log_probs - actor_log_probs).abs()[response_mask.bool()]
    return {"mean": delta.mean().item(), "max": delta.max().item()}


def add_to_metrics(original: Callable) -> Callable:
    """Provider for verl's compute_data_metrics: adds the two log-prob deltas where the batch has both sides."""

    @functools.wraps(original)
    def compute(batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        metrics = original(batch, *args, **kwargs)
        tensors = batch.batch
        if "rollout_log_probs" in tensors.keys() and "old_log_probs" in tensors.keys():
            delta = logprob_delta(tensors["rollout_log_probs"], tensors["old_log_probs"], tensors["response_mask"])
            metrics.update({MEAN: delta["mean"], MAX: delta["max"]})
        return metrics

    return compute


def comparable(rollout: Any) -> bool:
    """True where the sampling settings leave the distribution as the model gives it."""
    return rollout.temperature == 1.0 and rollout.top_p in (1, 1.0) and rollout.top_k in (-1, 0)


def why_not(rollout: Any, replayed: bool, balanced: bool = False) -> str | None:
    """Why a run's log-probs cannot be compared, in words; None where they can. `balanced`: routing is forced."""
    if replayed:
        return "the responses are recorded ones"
    if balanced:
        return "balanced routing takes experts by a token's place in the batch, which differs from vLLM to training"
    if comparable(rollout):
        return None
    return (f"sampling changes the distribution (temperature {rollout.temperature}, top_p {rollout.top_p}, top_k "
            f"{rollout.top_k}; comparable at 1, 1, -1)")


def check(step: int, delta: dict[str, float] | None, limit: float) -> None:
    """WeightSyncError where the mean |delta| is above `limit` (nats), not a number, or missing."""
    if delta is None:
        raise WeightSyncError(f"step {step}: vLLM gave no log-probs to compare the actor's with, expected one for each "
                              "sampled token; set recipe.logprob_check.action=off to run without the check")
    if delta["mean"] <= limit:
        return
    raise WeightSyncError(
        f"step {step}: vLLM's log-probs of the sampled tokens differ from the actor's by {delta['mean']:.3g} on "
        f"average (max {delta['max']:.3g}), expected at most {limit:g}. The rollout engine does not hold the actor's "
        "weights, or computes another model: look at the last weight sync (`status --run DIR` for its rows), then at "
        "router bias and expert order. recipe.logprob_check.action=report goes on all the same."
    )
