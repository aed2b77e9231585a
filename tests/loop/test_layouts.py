"""Every layout trains, its weights arrive in vLLM, and gradients do not depend on how the model is split."""

import pytest
from safetensors.torch import load_file

pytestmark = [pytest.mark.slow, pytest.mark.full]
LAYOUTS = {"tp2ep2": ("--rollout-tp", "2"), "ep2pp2": ("--rollout-tp", "2", "--rollout-dp", "2")}
EVERY = "recipe.reshard.verify=every"


def assert_weights_arrive(run, limit):
    assert run.summary["exit"] == "ok" and all(s["logprob_delta"]["mean"] < limit for s in run.steps)
    assert all(s["grad_norm"] > 0 and s["sync"]["syncs"] == 1 for s in run.steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_arrive_and_the_first_gradient_is_that_of_every_layout(smoke, layout):
    """In fp32 all layouts sample the same first responses: rollout data parallelism splits the prompts alike."""
    run, other = smoke("--train-layout", layout, *LAYOUTS[layout], "--steps", "2", EVERY), smoke()
    assert_weights_arrive(run, 1e-5)
    assert all(s["sync"]["verified"] for s in run.steps)
    assert run.steps[0]["grad_norm"] == pytest.approx(other.steps[0]["grad_norm"], rel=1e-3)
    assert run.steps[0]["reward"] == other.steps[0]["reward"]


def test_dp_ranks_with_uneven_sequences_do_not_hang(smoke):
    """One DP rank is done before the other, and must not hang it.

    verl takes what follows a stop word for valid tokens, so log-probs are not compared here; tests/rollout does.
    """
    run = smoke(
        "--rollout-dp",
        "2",
        "--steps",
        "2",
        "recipe.worker_process_setup_hook=odd_worker.stop_early",
        "data.max_response_length=48",
        "recipe.logprob_check.action=off",
    )
    lengths = [
        [int((row < 32).int().argmax()) for row in half]
        for half in load_file(run.folder / "rollouts" / "step_1.safetensors")["responses"].chunk(2)
    ]
    assert run.summary["exit"] == "ok" and max(lengths[0]) != max(lengths[1]), lengths


def test_weights_arrive_in_bf16(smoke):
    assert_weights_arrive(smoke("--dtype", "bf16", "--steps", "2", EVERY), 0.05)
