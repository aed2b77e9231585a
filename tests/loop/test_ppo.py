"""Test PPO in the loop: actor and critic in one process, killed, on both lines, and a critic as verl trains it."""

import pytest
from loop_runs import KILLED, PPO, assert_goes_on, assert_weights_arrive

from verl_patches.weights.manifest import CRITIC, folder_problems, read_manifest

pytestmark = pytest.mark.slow


@pytest.fixture
def ppo(smoke):
    """Run two steps, each saved."""
    return smoke(*PPO)


def critic_norm(run):
    return run.steps[0]["critic"]["grad_norm"]


def test_a_critic_trains_beside_the_actor(ppo):
    assert_weights_arrive(ppo)
    for step in ppo.steps:
        assert step["critic"]["loss"] > 0 and step["critic"]["grad_norm"] > 0
        assert step["memory"]["violations"]["count"] == 0
        assert step["seconds"]["values"] > 0 and step["seconds"]["update_critic"] > 0
    held = ppo.steps[1]["memory"]["phases"]["update_critic"]["bytes"]
    assert held["critic_params"] and held["critic_grads"] and held["critic_optimizer"]
    assert "vf_loss" in ppo.progress and f"{ppo.steps[1]['critic']['loss']:.5f}" in ppo.progress


@pytest.mark.nightly
def test_a_run_that_is_killed_goes_on_to_the_numbers_of_the_uninterrupted_one(smoke, ppo):
    """Kill the run in step 2, between the critic's update and the actor's."""
    saved = ppo.folder / "checkpoints" / "global_step_1"
    assert read_manifest(saved).facts[CRITIC] == read_manifest(saved / CRITIC).identity
    assert folder_problems(saved / CRITIC, read_manifest(saved / CRITIC)) == []
    killed = smoke(*PPO, *KILLED)
    assert_goes_on(killed, ppo, "step", "reward", "grad_norm", "critic")


@pytest.mark.nightly
def test_a_critic_whose_gradients_are_not_reduced_is_seen(smoke, ppo):
    """Train verl's own critic of both pins, which each rank would step with its own gradients."""
    off = "recipe.patches=[-update.critic_gradients]"
    run = smoke("--steps", "1", PPO[2], "--replay-rollout", str(ppo.folder), off)
    assert critic_norm(run) != pytest.approx(critic_norm(ppo), rel=1e-2)
    assert run.steps[0]["grad_norm"] == pytest.approx(ppo.steps[0]["grad_norm"], rel=1e-5)  # the actor's: the control


@pytest.mark.upstream
def test_both_lines_have_the_same_critic_on_the_same_responses(a3, ppo):
    run = a3("--steps", "2", PPO[2], "--replay-rollout", str(ppo.folder))
    assert critic_norm(run) == pytest.approx(critic_norm(ppo), rel=1e-3)
    assert run.steps[0]["critic"]["loss"] == pytest.approx(ppo.steps[0]["critic"]["loss"], rel=1e-4)
    assert run.steps[0]["grad_norm"] == pytest.approx(ppo.steps[0]["grad_norm"], rel=1e-3)
    second = run.steps[1]
    assert run.summary["exit"] == "ok" and second["grad_norm"] > 0
    assert (
        second["critic"]["loss"] < run.steps[0]["critic"]["loss"] and critic_norm(run) != second["critic"]["grad_norm"]
    )
