"""The swapped step over Megatron's real DistributedOptimizer: equal bit for bit, and bounded on the device."""

import pytest

from verl_patches.config.checks import check_config
from verl_patches.config.compose import compose

PARTS = ("swapped", "swap_controls", "counting_by_group")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["fp32 in 3", "fp32 in 1", "bf16 in 100"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_swapped_step_equals_the_unswapped_one_and_has_one_piece_on_the_device(offload_job, ranks, case):
    """Row memory.swap_optimizer."""
    for found in offload_job(*PARTS[: 3 if ranks == 1 else 1], ranks=ranks):
        swapped = found["swapped"][case]
        assert swapped["equal"] == [True] * 3
        for number, step in enumerate(swapped["steps"]):
            assert step["copies_per_byte"] == 1 and (step["host_bytes"] > 0) == (number == 0)
            assert 0 < step["swap_peak_bytes"] <= swapped["limit"]
        last = swapped["steps"][2]
        total = last["moves"]["load optimizer"]["bytes"]
        assert last["moves"]["offload optimizer"]["bytes"] == total > 0
        assert (last["swap_peak_bytes"] < total / 2) == (case != "fp32 in 1")
        assert (not swapped["first"]) == case.startswith("fp32")  # fp32 has no main parameters to offload


@pytest.mark.slow
def test_optimizers_that_cannot_be_swapped_are_refused_by_name(offload_job):
    controls = offload_job(*PARTS)[0]["swap_controls"]
    assert controls.pop("equal without exp_avg_sq") == [True, False, False]  # negative control
    for case, words in {
        "plain": "FP32Optimizer is no DistributedOptimizer",
        "times": "swap_optimizer_times is 0",
        "sgd": "SGD is none of Adam, AdamW, FusedAdam",
    }.items():
        assert "ConfigError: recipe.train.swap_optimizer cannot swap" in controls[case] and words in controls[case]


@pytest.mark.slow
def test_an_adam_that_counts_by_group_counts_a_step_once(offload_job):
    assert offload_job(*PARTS)[0]["counting_by_group"] == {"equal": [True] * 3, "counts": [3, 3]}


@pytest.mark.parametrize(("override", "words"), [
    ("actor_rollout_ref.actor.megatron.optimizer_offload=true", "actor.megatron.optimizer_offload=false"),
    ("recipe.train.swap_optimizer_times=4", ""),
])  # fmt: skip
def test_the_configuration_is_refused_where_it_contradicts_itself(override, words):
    config = compose("grpo_deepseekv3_tiny_cpu", ["recipe.train.swap_optimizer=true", override])
    (check,) = [c for c in check_config(config) if c.name == "swap optimizer"]
    assert check.ok == (not words) and words in check.detail
