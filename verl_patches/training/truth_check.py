"""Does the rollout engine hold the actor's weights? Compare both log-probs of the very tokens that were sampled.

Valid at temperature 1 with top-p and top-k off, where vLLM's sampled log-prob and the actor's are the same quantity. In
fp32 right weights give about 1e-6 and wrong ones above 0.1, so one number per step separates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DELTA = "recipe/logprob_delta"
MEAN, STD, MAX = f"{DELTA}_mean", f"{DELTA}_std", f"{DELTA}_max"
PEARSON, NOT_FINITE = "recipe/logprob_pearson", "recipe/logprob_not_finite"
KL, K3_KL = "rollout_corr/kl", "rollout_corr/k3_kl"  # verl's names
IN_SUMMARY = {"mean": MEAN, "max": MAX, "std": STD, "pearson": PEARSON, "kl": KL, "k3_kl": K3_KL,
              "not_finite": NOT_FINITE}  # fmt: skip


class WeightSyncError(RuntimeError):
    """vLLM's and the actor's log-probs of the same tokens differ by more than the limit."""


def logprob_delta(metrics: Mapping[str, float]) -> dict[str, float] | None:
    """What a step's metrics say of both sides' log-probs, as summary.json has it; None where they say nothing."""
    return {name: metrics[key] for name, key in IN_SUMMARY.items() if key in metrics} or None


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
    if delta.get("not_finite"):
        raise WeightSyncError(
            f"step {step}: {delta['not_finite']:.0f} sampled tokens have no finite log-prob in vLLM or in the actor, "
            "expected none: look at the last weight sync, then for an overflow. "
            "recipe.logprob_check.action=report goes on all the same."
        )
    raise WeightSyncError(
        f"step {step}: vLLM's log-probs of the sampled tokens differ from the actor's by {delta['mean']:.3g} on "
        f"average (max {delta['max']:.3g}), expected at most {limit:g}. The rollout engine does not hold the actor's "
        "weights, or computes another model: look at the last weight sync (`status --run DIR` for its rows), then at "
        "router bias and expert order. A single token, max far above the average, may also have had two experts nearly "
        "tied: another actor_rollout_ref.rollout.seed tells. recipe.logprob_check.action=report goes on all the same."
    )
