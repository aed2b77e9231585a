"""PPO in the loop: actor and critic in one process, resumed, on both lines, and a critic as verl trains it."""

import pytest
from loop_runs import assert_weights_arrive, metrics_of, resume

from verl_patches.weights.manifest import CRITIC, folder_problems, read_manifest

pytestmark = pytest.mark.slow
PPO = "algo=ppo"


@pytest.fixture
def ppo(smoke):
    """Two steps, each saved."""
    return smoke("--steps", "2", PPO, "trainer.save_freq=1")


def critic_norm(run):
    return run.steps[0]["critic"]["grad_norm"]


def test_a_critic_trains_beside_the_actor(ppo):
    assert_weights_arrive(ppo)
    for step in ppo.steps:
        assert step["critic"]["loss"] > 0 and step["critic"]["grad_norm"] > 0
        assert step["memory"]["violations"]["count"] == 0
        assert step["seconds"]["values"] > 0 and step["seconds"]["update_critic"] > 0
        assert {"compute_values", "update_critic"} <= step["dispatch"]["start_skew_s"]["by_call"].keys()
    held = ppo.steps[1]["memory"]["phases"]["update_critic"]["bytes"]
    assert held["critic_params"] and held["critic_grads"] and held["critic_optimizer"]
    assert "vf_loss" in ppo.progress and f"{ppo.steps[1]['critic']['loss']:.5f}" in ppo.progress


def test_a_resumed_run_has_the_numbers_of_the_uninterrupted_one(smoke, ppo):
    saved = ppo.folder / "checkpoints" / "global_step_1"
    assert read_manifest(saved).facts[CRITIC] == read_manifest(saved / CRITIC).identity
    assert folder_problems(saved / CRITIC, read_manifest(saved / CRITIC)) == []
    resumed = smoke("--steps", "2", PPO, *resume(ppo, 1))
    names = ("step", "reward", "grad_norm", "critic")
    assert metrics_of(resumed, *names) == metrics_of(ppo, *names)[1:]


def test_a_critic_whose_gradients_are_not_reduced_is_seen(smoke, ppo):
    """verl's own at both pins, which each rank would step with gradients of its own."""
    off = "recipe.patches=[-update.critic_gradients]"
    run = smoke("--steps", "1", PPO, "--replay-rollout", str(ppo.folder), off)
    assert critic_norm(run) != pytest.approx(critic_norm(ppo), rel=1e-2)
    assert run.steps[0]["grad_norm"] == pytest.approx(ppo.steps[0]["grad_norm"], rel=1e-5)  # the actor's: the control


@pytest.mark.upstream
def test_both_lines_have_the_same_critic_on_the_same_responses(a3, ppo):
    run = a3("--steps", "1", PPO, "--replay-rollout", str(ppo.folder))
    assert critic_norm(run) == pytest.approx(critic_norm(ppo), rel=1e-3)
    assert run.steps[0]["critic"]["loss"] == pytest.approx(ppo.steps[0]["critic"]["loss"], rel=1e-4)
    assert run.steps[0]["grad_norm"] == pytest.approx(ppo.steps[0]["grad_norm"], rel=1e-3)
