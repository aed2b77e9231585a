"""Test the loop without a pass for old log-probs, with weights, with sequence ratios: gradients and closed forms."""

import pytest
from loop_runs import TP2EP2

pytestmark = pytest.mark.slow
SKIP = "recipe.train.skip_old_log_prob=true"
HALF = ("recipe.rollout_correction.rollout_is=token", "recipe.rollout_correction.rollout_is_threshold=0.5")


def assert_same_but_for_the_pass(skipped, plain):
    for step, other in zip(skipped.steps, plain.steps, strict=True):
        assert (step["grad_norm"], step["reward"]) == (other["grad_norm"], other["reward"])
        assert step["logprob_delta"] == pytest.approx(other["logprob_delta"], rel=1e-9)
        assert 0 < step["logprob_delta"]["mean"] < 1e-5 and step["logprob_delta"]["pearson"] > 0.999
        assert "log_prob" not in step["seconds"] and other["seconds"]["log_prob"] > 0


def test_skipped_steps_are_the_same_steps_without_the_pass(smoke):
    """Test rows update.on_policy and update.loss_on_policy; test_emulated_npu.py tests line a3.

    Both log-probs of a response are counted once, whichever ranks have them.
    """
    plain, skipped = smoke(*TP2EP2), smoke(*TP2EP2, SKIP)
    assert_same_but_for_the_pass(skipped, plain)


@pytest.mark.nightly
def test_a_cap_of_one_half_halves_the_gradient(smoke):
    """Use fp32, where ratios are within 1e-5 of 1, so all weights are 1/2; at step 1 the KL loss has no gradient."""
    run = smoke("--steps", "1", SKIP, *HALF)
    assert run.steps[0]["grad_norm"] == pytest.approx(smoke().steps[0]["grad_norm"] / 2, rel=1e-6)
    assert run.steps[0]["logprob_delta"]["mean"] < 1e-5
