"""The loop with tensors that stay on the workers: the same steps, bit for bit, where the order is the same."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full]
ON, ARRIVAL = "recipe.tensor_cache.enabled=true", "trainer.balance_batch=false"
# at step 2 of the tiny run a token is on the edge between two experts, and vLLM takes the other one
SAY = "recipe.logprob_check.action=report"
ACTOR = "actor_rollout_ref.actor"


def assert_same_steps(kept, plain):
    assert [step["grad_norm"] for step in kept.steps] == [step["grad_norm"] for step in plain.steps]
    assert [step["reward"] for step in kept.steps] == [step["reward"] for step in plain.steps]
    for step, other in zip(kept.steps, plain.steps, strict=True):
        assert step["logprob_delta"]["mean"] == pytest.approx(other["logprob_delta"]["mean"], rel=1e-6)
        assert step["tensor_cache"]["received_bytes"] > 0 and "tensor_cache" not in other


def test_in_arrival_order_the_steps_are_those_of_verl(smoke):
    """Rows rollout.keep_responses, rollout.generate_kept, update.run_kept; mini batches, epochs, validation."""
    more = ["--train-layout", "tp2ep2", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2",
            "trainer.test_freq=1"]
    plain, kept = (smoke("--steps", "2", ARRIVAL, SAY, *more, *on) for on in ([], [ON]))
    assert_same_steps(kept, plain)


def test_balanced_steps_are_the_same_but_for_rounding(smoke):
    kept, plain = smoke("--steps", "2", SAY, ON), smoke("--steps", "2", SAY, ARRIVAL)
    for step, other in zip(kept.steps, plain.steps, strict=True):
        assert step["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_critic_warm_up_leaves_nothing(smoke):
    run = smoke("--steps", "2", SAY, ON, "trainer.critic_warmup=2")
    assert run.steps[0]["grad_norm"] is None and run.steps[1]["grad_norm"] > 0
    assert "was not closed" not in (run.folder / "driver.log").read_text()


@pytest.mark.upstream
@pytest.mark.parametrize("more", [[], ["algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=true"]])
def test_line_a3(a3, more):
    plain, kept = (a3("--steps", "2", ARRIVAL, SAY, *more, *on) for on in ([], [ON]))
    assert_same_steps(kept, plain)
