"""Check vLLM's log-probs of the sampled tokens against the actor's, every step.

The check is valid only at temperature 1 with top-p and top-k off, where both are the same quantity. In fp32, correct
weights give about 1e-6 and wrong ones above 0.1. A run with other sampling settings draws extra sequences for the
check every N steps (sampled_check.py). No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl_patches.errors import Check
from verl_patches.spec import RunSpec
from verl_patches.step.log_probs.rollout_log_probs import CHECK_TOKENS

DELTA_MEAN, DELTA_STD, DELTA_MAX = "recipe/logprob_delta_mean", "recipe/logprob_delta_std", "recipe/logprob_delta_max"
PEARSON, NOT_FINITE = "recipe/logprob_pearson", "recipe/logprob_not_finite"
KL, K3_KL = "rollout_corr/kl", "rollout_corr/k3_kl"  # verl's names
SUMMARY_METRICS = {
    "mean": DELTA_MEAN,
    "max": DELTA_MAX,
    "std": DELTA_STD,
    "pearson": PEARSON,
    "kl": KL,
    "k3_kl": K3_KL,
    "not_finite": NOT_FINITE,
}


class WeightSyncError(RuntimeError):
    """Report that vLLM's and the actor's log-probs of the same tokens differ by more than the limit."""


def logprob_delta(metrics: Mapping[str, float]) -> dict[str, float] | None:
    """Return the entries of SUMMARY_METRICS that a step's metrics have; None if they have none."""
    return {name: metrics[key] for name, key in SUMMARY_METRICS.items() if key in metrics} or None


def incomparable_reason(run: RunSpec, sampled: bool = False) -> str | None:
    """Return the reason why a run's log-probs cannot be compared, as text; None if they can.

    `sampled`: extra sequences are sampled, so the run's sampling settings do not matter.
    """
    recipe, rollout = run.recipe, run.verl.actor_rollout_ref.rollout
    if recipe.rollout.replay is not None:
        return "the responses come from a recording"
    if recipe.rollout.balanced_routing or recipe.train.balanced_routing:
        return "balanced routing selects experts by a token's place in the batch, which differs in vLLM and training"
    if sampled or (rollout.temperature, rollout.top_p) == (1, 1) and rollout.top_k in (-1, 0):
        return None
    return (
        f"sampling changes the distribution (temperature {rollout.temperature}, top_p {rollout.top_p}, top_k "
        f"{rollout.top_k}; comparable at 1, 1, -1)"
    )


def unchecked_reason(run: RunSpec) -> str | None:
    """Return the reason why a run compares no log-probs; None if it compares them."""
    if not run.samples:
        return "no response is sampled"
    check = run.recipe.logprob_check
    if check.action == "off":
        return "recipe.logprob_check.action=off"
    reason = incomparable_reason(run, sampled=check.every is not None)
    if reason and not incomparable_reason(run, sampled=True):
        reason += "; set recipe.logprob_check.every=N to compare extra sequences"
    return reason


def logprob_checks(run: RunSpec) -> Iterator[Check]:
    """Check whether and when the run compares log-probs; a note if it never does."""
    faults = list(_sampling_faults(run))
    yield from (Check("truth check", False, fault) for fault in faults)
    if faults:
        return
    if reason := unchecked_reason(run):
        yield Check("truth check", True, f"log-probs are never compared: {reason}", note=True)
    elif run.recipe.logprob_check.every is None:
        yield Check("truth check", True, "all sampled tokens of every step")
    else:
        text = f"from step 1 every {run.recipe.logprob_check.every}: {run.replicas} x {CHECK_TOKENS} tokens"
        yield Check("truth check", True, text)


def _sampling_faults(run: RunSpec) -> Iterator[str]:
    """Yield reasons why a configuration cannot sample sequences for the check, one sentence each."""
    section = run.recipe.logprob_check
    if section.every is None or section.action == "off":
        return
    fact = f"recipe.logprob_check.every is {section.every}, but"
    if reason := unchecked_reason(run):
        yield f"{fact} log-probs cannot be compared: {reason}; set recipe.logprob_check.action=off"
    rollout = run.verl.actor_rollout_ref.rollout
    if rollout.name != "vllm" or rollout.mode != "sync":
        yield f"{fact} actor_rollout_ref.rollout is {rollout.name}, {rollout.mode}; expected vllm, sync"


def check_delta(step: int, delta: dict[str, float] | None, limit: float) -> None:
    """Raise WeightSyncError if the mean |delta| is above `limit` (nats), not a number, or missing."""
    if delta is None:
        raise WeightSyncError(
            f"step {step}: vLLM gave no log-probs to compare the actor's with, expected one for each "
            "sampled token; set recipe.logprob_check.action=off to run without the check"
        )
    if delta["mean"] <= limit:
        return
    if delta.get("not_finite"):
        raise WeightSyncError(
            f"step {step}: {delta['not_finite']:.0f} sampled tokens have no finite log-prob in vLLM or in the actor, "
            "expected none. Check the last weight sync, then look for an overflow; "
            "recipe.logprob_check.action=report continues in spite of it."
        )
    raise WeightSyncError(
        f"step {step}: vLLM's log-probs of the sampled tokens differ from the actor's by {delta['mean']:.3g} on "
        f"average (max {delta['max']:.3g}), expected at most {limit:g}. The rollout engine does not hold the actor's "
        "weights, or computes another model: check the last weight sync (`status --run DIR` for its rows), then router "
        "bias and expert order. If one token alone differs (max far above the average), two experts may be nearly "
        "tied: repeat with another actor_rollout_ref.rollout.seed. recipe.logprob_check.action=report continues."
    )
