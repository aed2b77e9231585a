"""The swapped step over Megatron's real DistributedOptimizer: equal bit for bit, and bounded on the device."""

import pytest

from verl_patches.config.checks import check_config
from verl_patches.config.compose import compose

PARTS = ("swapped", "swap_controls", "counting_by_group")
CASES = ("fp32 in 3", "fp32 in 1", "bf16 in 4", "bf16 in 100")


@pytest.fixture(params=[1, 2])
def ranks(request, offload_job):
    return offload_job(*PARTS[: 3 if request.param == 1 else 1], ranks=request.param)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_swapped_step_is_the_unswapped_one_bit_for_bit(ranks, case):
    """Row memory.swap_optimizer."""
    for found in ranks:
        swapped = found["swapped"][case]
        assert swapped["equal"] == [True] * 3
        assert [step["copies_per_byte"] for step in swapped["steps"]] == [1, 1, 1]
        assert [step["host_bytes"] > 0 for step in swapped["steps"]] == [True, False, False]
        last = swapped["steps"][2]["moves"]
        assert last["load optimizer"]["bytes"] == last["offload optimizer"]["bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_never_more_than_one_piece_is_on_the_device(ranks, case):
    for found in ranks:
        swapped = found["swapped"][case]
        assert all(0 < step["swap_peak_bytes"] <= max(swapped["limits"]) for step in swapped["steps"])
        total = swapped["steps"][2]["moves"]["load optimizer"]["bytes"]
        assert (swapped["steps"][2]["swap_peak_bytes"] < total / 2) == (case != "fp32 in 1")
        assert (swapped["first"] is None) == case.startswith("fp32")  # fp32 has no main parameters to take away


@pytest.mark.slow
def test_what_cannot_be_swapped_is_refused_by_name(offload_job):
    said = offload_job(*PARTS)[0]["swap_controls"]
    for case, words in {
        "plain": "FP32Optimizer is no DistributedOptimizer",
        "times": "swap_optimizer_times is 0",
        "sgd": "SGD is none of Adam, AdamW, FusedAdam",
    }.items():
        assert said[case].startswith("ConfigError: recipe.train.swap_optimizer cannot swap") and words in said[case]


@pytest.mark.slow
def test_a_state_that_is_not_written_back_shows_in_the_next_step(offload_job):
    """Negative control."""
    assert offload_job(*PARTS)[0]["swap_controls"]["forgotten state is equal"] == [True, False, False]


@pytest.mark.slow
def test_an_adam_that_counts_by_group_counts_a_step_once(offload_job):
    assert offload_job(*PARTS)[0]["counting_by_group"] == {"equal": [True] * 3, "counts": [3, 3]}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor_rollout_ref.actor.megatron.optimizer_offload=true", "actor.megatron.optimizer_offload=false"),
        ("recipe.train.swap_optimizer_times=0", "expected at least 1"),
        ("recipe.train.swap_optimizer_times=4", ""),
    ],
)
def test_the_configuration_is_refused_where_it_contradicts_itself(override, words):
    config = compose("grpo_deepseekv3_tiny_cpu", ["recipe.train.swap_optimizer=true", override])
    (check,) = [c for c in check_config(config) if c.name == "swap optimizer"]
    assert check.ok == (not words) and words in check.detail
