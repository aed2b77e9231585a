import pytest
import torch

from verl_patches.training import truth_check


def test_delta_is_mean_and_max_over_valid_tokens_only():
    rollout = torch.tensor([[-1.0, -2.0, -9.0]])
    actor = torch.tensor([[-1.5, -2.0, 0.0]])
    delta = truth_check.logprob_delta(rollout, actor, torch.tensor([[1, 1, 0]]))
    assert delta == {"mean": 0.25, "max": 0.5}


def test_check_stops_above_the_limit_and_says_what_to_do():
    truth_check.check(2, {"mean": 9e-6, "max": 1.0}, 1e-5)
    with pytest.raises(truth_check.WeightSyncError, match="gave no log-probs"):
        truth_check.check(2, None, 1e-5)
    with pytest.raises(truth_check.WeightSyncError):
        truth_check.check(2, {"mean": float("nan"), "max": float("nan")}, 1e-5)
    words = r"step 2: .* differ .* by 0\.5 .* at most 1e-05.*action=report"
    with pytest.raises(truth_check.WeightSyncError, match=words):
        truth_check.check(2, {"mean": 0.5, "max": 1.0}, 1e-5)


@pytest.mark.parametrize(("sampling", "expected"), [
    ((1.0, 1, -1), True), ((1.0, 1.0, 0), True), ((0.9, 1, -1), False), ((1.0, 0.9, -1), False), ((1.0, 1, 50), False)])
def test_only_unchanged_distributions_are_compared(sampling, expected):
    from types import SimpleNamespace

    temperature, top_p, top_k = sampling
    rollout = SimpleNamespace(temperature=temperature, top_p=top_p, top_k=top_k)
    assert truth_check.comparable(rollout) is expected
    assert (truth_check.why_not(rollout, replayed=False) is None) is expected
    assert "recorded" in truth_check.why_not(rollout, replayed=True)
    assert "balanced" in truth_check.why_not(rollout, replayed=False, balanced=True)
