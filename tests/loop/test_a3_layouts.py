"""Line a3 at every layout of the smoke: experts whole over TP x EP, stages by a list of layers, as in production."""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.upstream]
LAYOUTS = {"ep2pp2": ("--rollout-tp", "2"), "tp2ep2": ("--rollout-tp", "2", "--rollout-dp", "2")}
MEGATRON, MODEL = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.model"
OFFLOAD = (
    f"{MEGATRON}.param_offload=true",
    f"{MEGATRON}.grad_offload=true",
    "actor_rollout_ref.ref.megatron.param_offload=true",
    "recipe.worker_process_setup_hook=offload_probe.nothing_left",
)
SWAP = (f"{MEGATRON}.optimizer_offload=false", "recipe.train.swap_optimizer=true")
RECOMPUTE = (
    f"{MODEL}.enable_gradient_checkpointing=true",
    *(
        f"{MODEL}.gradient_checkpointing_kwargs.activations_checkpoint_{key}={value}"
        for key, value in {"granularity": "full", "method": "block", "num_layers": 4}.items()
    ),
)


def assert_weights_arrive(run, limit):
    assert run.summary["exit"] == "ok" and all(s["logprob_delta"]["mean"] < limit for s in run.steps)
    assert all(s["grad_norm"] > 0 for s in run.steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_arrive_and_the_first_gradient_is_that_of_every_layout(a3, layout):
    """Row reshard.direct; fp32, as test_layouts.py has it for the other line."""
    run, other = a3("--train-layout", layout, *LAYOUTS[layout], "--steps", "2", "recipe.reshard.verify=every"), a3()
    assert_weights_arrive(run, 1e-5)
    assert all(s["sync"]["verified"] and s["sync"]["syncs"] == 1 for s in run.steps)
    assert run.steps[0]["grad_norm"] == pytest.approx(other.steps[0]["grad_norm"], rel=1e-3)
    assert run.steps[0]["reward"] == other.steps[0]["reward"]


def test_memory_as_in_production_changes_no_update(a3):
    """Host optimizer, offload and full recompute, in bf16 with experts whole over TP x EP, against a run without.

    Rows memory.offload_model and memory.load_model: nothing of the actor is on the device during rollout, experts
    included; tests/memory/test_offload.py has the control, verl's own offload.
    """
    bf16 = ("--train-layout", "tp2ep2", "--dtype", "bf16", "--steps", "2")
    plain = a3(*bf16)
    assert_weights_arrive(plain, 0.05)
    saving = a3(*bf16, *OFFLOAD, *SWAP, *RECOMPUTE)
    log = (saving.folder / "driver.log").read_text()
    assert "swap_optimizer=True" in log and "recompute_granularity='full'" in log  # Megatron's own arguments
    assert_weights_arrive(saving, 0.05)
    assert [s["grad_norm"] for s in saving.steps] == [s["grad_norm"] for s in plain.steps]
