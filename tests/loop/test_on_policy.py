"""Test the loop without a pass for old log-probs, with weights, with sequence ratios: gradients and closed forms."""

import json
import math

import pytest
from loop_runs import TP2EP2

pytestmark = pytest.mark.slow
SKIP = "recipe.train.skip_old_log_prob=true"
# bounds that mask no token in fp32
MASK = ("recipe.rollout_correction.rollout_rs=token_k1", "recipe.rollout_correction.rollout_rs_threshold=0.5_2.0")
HALF = ("recipe.rollout_correction.rollout_is=token", "recipe.rollout_correction.rollout_is_threshold=0.5")


def assert_same_but_for_the_pass(skipped, plain):
    for step, other in zip(skipped.steps, plain.steps, strict=True):
        assert (step["grad_norm"], step["reward"]) == (other["grad_norm"], other["reward"])
        assert step["logprob_delta"] == pytest.approx(other["logprob_delta"], rel=1e-9)
        assert 0 < step["logprob_delta"]["mean"] < 1e-5 and step["logprob_delta"]["pearson"] > 0.999
        assert "log_prob" not in step["seconds"] and other["seconds"]["log_prob"] > 0


def test_skipped_steps_are_the_same_steps_without_the_pass(smoke):
    """Test rows update.on_policy and update.loss_on_policy; test_emulated_npu.py tests line a3.

    Both log-probs of a response are counted once, whichever ranks have them. A mask that masks no token changes no
    digit, and its metrics come from inside the update.
    """
    plain, skipped = smoke(*TP2EP2), smoke(*TP2EP2, SKIP, *MASK)
    assert_same_but_for_the_pass(skipped, plain)
    lines = (skipped.folder / "metrics.jsonl").read_text().splitlines()
    for step, metrics in zip(skipped.steps, map(json.loads, lines), strict=True):
        assert step["masked_share"] == metrics["rollout_corr/rollout_rs_masked_fraction"] == 0
        gap = metrics["recipe/worst_token/actor_logprob"] - metrics["recipe/worst_token/rollout_logprob"]
        assert abs(gap) == pytest.approx(step["logprob_delta"]["max"], rel=1e-6)
        assert abs(math.log(metrics["recipe/token_ratio/p99.9"])) <= 1.024 * step["logprob_delta"]["max"]
    assert [step["masked_share"] for step in plain.steps] == [None, None]


@pytest.mark.nightly
def test_a_cap_of_one_half_halves_the_gradient(smoke):
    """Use fp32, where ratios are within 1e-5 of 1, so all weights are 1/2; at step 1 the KL loss has no gradient."""
    run = smoke("--steps", "1", SKIP, *HALF)
    assert run.steps[0]["grad_norm"] == pytest.approx(smoke().steps[0]["grad_norm"] / 2, rel=1e-6)
    assert run.steps[0]["logprob_delta"]["mean"] < 1e-5
