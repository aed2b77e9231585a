"""Test that the log-prob check stops the run at the step of a wrong weight sync; test_emulated_npu.py has line a3.

A hook alone changes nothing: test_emulated_npu.py has runs with `move_requests`, whose log-probs are right.
"""

import pytest
from loop_runs import assert_caught, hook

pytestmark = pytest.mark.slow
ROLLOUT, NO_SYNC = "actor_rollout_ref.rollout", "recipe.weight_sync.enabled=false"


@pytest.mark.nightly
def test_a_skipped_sync_is_caught_at_the_first_step_that_skips(smoke):
    """Test row update.sharding_manager with RLOO."""
    run = smoke("--steps", "3", NO_SYNC, "algo=rloo", ok=False)
    assert run.steps[0]["logprob_delta"]["mean"] < 1e-5
    assert_caught(run, 2)


SAMPLED = (
    "recipe.logprob_check.every=2",
    "recipe.memory.ledger=strict",
    "recipe.train.skip_old_log_prob=true",
    "recipe.tensor_cache.enabled=true",  # together as in the 256-die run with true weights
    f"{ROLLOUT}.temperature=0.9",
    f"{ROLLOUT}.top_p=0.9",
    f"{ROLLOUT}.top_k=50",
)


@pytest.mark.nightly
def test_at_another_sampling_a_skipped_sync_is_caught_in_the_next_checked_step(smoke):
    """Test row rollout.keep_log_probs with Dr. GRPO, which has no reference."""
    run = smoke("--steps", "4", *SAMPLED, NO_SYNC, "algo=dr_grpo", ok=False)
    first, second = run.steps[:2]
    assert first["logprob_delta"]["mean"] < 1e-5 and second["logprob_delta"] is second["logprob_check"] is None
    assert (first["logprob_check"]["sequences"], first["logprob_check"]["tokens"]) == (2, 32)
    assert_caught(run, 3)
    assert all("ref" not in step["seconds"] for step in run.steps)


@pytest.mark.parametrize(
    ("name", "words"), [("other_switches", "reshard.direct"), ("no_patches", "update.skip_bad_steps is reverted")]
)
def test_a_worker_that_differs_is_refused_before_step_one(smoke, name, words):
    run = smoke("--steps", "1", hook(name), ok=False)
    assert run.code == 1 and run.steps == [] and "PatchError" in run.summary["exit"]
    assert words in run.summary["exit"]
    assert {"other_switches": "other patches than the controller", "no_patches": "not active"}[name] in run.summary[
        "exit"
    ]
