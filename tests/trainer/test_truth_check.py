from types import SimpleNamespace

import pytest
import torch

from verl_patches.trainer import rollout_correction, truth_check


def test_delta_is_of_valid_tokens_only():
    """What the deltas are: tests/trainer/test_rollout_correction.py."""
    tensors = {
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, -9.0]]),
        "old_log_probs": torch.tensor([[-1.5, -2.0, 0.0]]),
        "response_mask": torch.tensor([[1, 1, 0]]),
    }
    compute = rollout_correction.add_to_metrics(lambda batch: {"of verl": 1.0})
    found = compute(SimpleNamespace(batch=tensors))
    delta = truth_check.logprob_delta(found)
    assert found["of verl"] == 1.0 and (delta["mean"], delta["max"], delta["kl"]) == (0.25, 0.5, 0.25)
    assert set(delta) == {"mean", "max", "std", "pearson", "kl", "k3_kl"}
    del tensors["rollout_log_probs"]
    assert compute(SimpleNamespace(batch=tensors)) == {"of verl": 1.0} and truth_check.logprob_delta({}) is None


def test_check_stops_above_the_limit_and_says_what_to_do():
    truth_check.check(2, {"mean": 9e-6, "max": 1.0}, 1e-5)
    with pytest.raises(truth_check.WeightSyncError, match="gave no log-probs"):
        truth_check.check(2, None, 1e-5)
    with pytest.raises(truth_check.WeightSyncError):
        truth_check.check(2, {"mean": float("nan"), "max": float("nan")}, 1e-5)
    with pytest.raises(truth_check.WeightSyncError, match="step 2: 3 sampled tokens have no finite log-prob"):
        truth_check.check(2, {"mean": float("nan"), "max": float("nan"), "not_finite": 3.0}, 1e-5)
    words = r"step 2: .* differ .* by 0\.5 .* at most 1e-05.*action=report"
    with pytest.raises(truth_check.WeightSyncError, match=words):
        truth_check.check(2, {"mean": 0.5, "max": 1.0}, 1e-5)


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ((1.0, 1, -1), True),
        ((1.0, 1.0, 0), True),
        ((0.9, 1, -1), False),
        ((1.0, 0.9, -1), False),
        ((1.0, 1, 50), False),
    ],
)
def test_only_unchanged_distributions_are_compared(sampling, expected):
    from types import SimpleNamespace

    temperature, top_p, top_k = sampling
    rollout = SimpleNamespace(temperature=temperature, top_p=top_p, top_k=top_k)
    assert truth_check.comparable(rollout) is expected
    assert (truth_check.why_not(rollout, replayed=False) is None) is expected
    assert truth_check.why_not(rollout, replayed=False, sampled=True) is None
    assert "recorded" in truth_check.why_not(rollout, replayed=True)
    assert "balanced" in truth_check.why_not(rollout, replayed=False, balanced=True, sampled=True)
