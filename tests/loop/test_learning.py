"""Test that the loop learns, and only because the weights reach the rollout engine."""

from statistics import mean, median

import pytest

from verl_patches.run.record.plots import run_figure, save_figure

pytestmark = pytest.mark.nightly


def gain(run):
    rewards = [step["reward"] for step in run.steps]
    assert all(0 <= reward <= 1 for reward in rewards) and len(rewards) >= 20
    return mean(rewards[-5:]) - mean(rewards[:5])


def test_reward_rises_by_three_tenths(smoke, tmp_path):
    run = smoke("--learn", "--steps", "28")
    assert gain(run) >= 0.3, [step["reward"] for step in run.steps]
    means = [step["logprob_delta"]["mean"] for step in run.steps]
    assert median(means) < 1e-5 and max(means) < 1e-3  # a near tie in routing may flip a token of a step
    same = save_figure(run_figure(run.summary), tmp_path / "training.png")
    assert (run.folder / "training.png").read_bytes() == same.read_bytes()


def test_without_weight_sync_it_does_not_learn(smoke):
    without = ("recipe.weight_sync.enabled=false", "recipe.logprob_check.action=report")
    run = smoke("--learn", "--steps", "20", *without)
    assert abs(gain(run)) < 0.1, [step["reward"] for step in run.steps]
    assert run.steps[-1]["logprob_delta"]["mean"] > 1e-3
