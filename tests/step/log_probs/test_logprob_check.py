"""Test which log-probs are compared, and when the comparison stops a run."""

import pytest
import torch

from tests.runs import tiny
from verl_patches.run.resolve import changed_run
from verl_patches.step.log_probs import logprob_check, rollout_correction
from verl_patches.step.log_probs.rollout_correction import log_prob_sums


def test_delta_is_of_valid_tokens_only():
    """Check one batch; tests/step/log_probs/test_rollout_correction.py has the values of others."""
    sides = torch.tensor([[-1.0, -2.0, -9.0]]), torch.tensor([[-1.5, -2.0, 0.0]]), torch.tensor([[1, 1, 0]])
    recipe = tiny().recipe
    metrics = rollout_correction.add_worker_metrics({"of verl": 1.0}, [log_prob_sums(*sides), None], recipe)
    delta = logprob_check.logprob_delta(metrics)
    assert metrics["of verl"] == 1.0 and (delta["mean"], delta["max"], delta["kl"]) == (0.25, 0.5, 0.25)
    assert set(delta) == {"mean", "max", "std", "pearson", "kl", "k3_kl"}
    assert rollout_correction.add_worker_metrics({"of verl": 1.0}, [None], recipe) == {"of verl": 1.0}
    assert logprob_check.logprob_delta({}) is None


NAN = float("nan")


@pytest.mark.parametrize(("delta", "words"), [
    (None, "gave no log-probs"),
    ({"mean": NAN, "max": NAN}, "step 2"),
    ({"mean": NAN, "max": NAN, "not_finite": 3.0}, "step 2: 3 sampled tokens have no finite log-prob"),
    ({"mean": 0.5, "max": 1.0}, r"step 2: .* differ .* by 0\.5 .* at most 1e-05.*action=report"),
])  # fmt: skip
def test_the_check_stops_above_the_limit_with_a_remedy(delta, words):
    logprob_check.check_delta(2, {"mean": 9e-6, "max": 1.0}, 1e-5)
    with pytest.raises(logprob_check.WeightSyncError, match=words):
        logprob_check.check_delta(2, delta, 1e-5)


@pytest.mark.parametrize(("temperature", "top_p", "top_k", "comparable"), [
    (1.0, 1, -1, True), (1.0, 1.0, 0, True), (0.9, 1, -1, False), (1.0, 0.9, -1, False), (1.0, 1, 50, False),
])  # fmt: skip
def test_only_unchanged_distributions_are_compared(temperature, top_p, top_k, comparable):
    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k}
    run = changed_run(tiny(), {f"actor_rollout_ref.rollout.{key}": value for key, value in sampling.items()})
    assert (logprob_check.incomparable_reason(run) is None) is comparable
    assert logprob_check.incomparable_reason(run, sampled=True) is None
