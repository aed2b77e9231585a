"""Test updates of verl's worker on line a3: skipped steps, Adam, correction bias, reference."""

from __future__ import annotations

import math

import pytest

from tests.model.mindspeed_start import LAYOUTS

pytestmark = [pytest.mark.slow, pytest.mark.upstream]
KEYS = {"moe_router_bias_update_rate": 0.01, "adam_beta2": 0.95}
MINI_BATCHES = "actor_rollout_ref.actor.ppo_mini_batch_size=2"  # prompts: two mini batches an update


@pytest.fixture(scope="session")
def updates(run_a3):
    """Return updates(layout, train keys, job, arguments) -> findings of mindspeed_job.py's job, by rank."""
    return lambda layout, train=(), job="update_job", arguments=(None,): run_a3(
        f"mindspeed_job:{job}", layout, *arguments, train=dict(train), more=[MINI_BATCHES]
    )


@pytest.fixture(scope="session")
def plain(updates):
    """Run two ranks of data and expert parallelism; rank 1 has NaN gradients in the third update."""
    return updates(LAYOUTS["ep2"], KEYS, arguments=(1,))


def norms_are_near(found, expected, rel) -> bool:
    """Return whether values of an update's mini batches are equal within `rel` of the largest of them.

    A later mini batch has a gradient norm of 1/500 here, and Adam's first step makes whole steps of gradients that are
    almost zero and mostly rounding.
    """
    bound = rel * max(map(abs, expected))
    return len(found) == len(expected) and all(abs(a - b) <= bound for a, b in zip(found, expected, strict=True))


def tensors_are_equal(one, other) -> bool:
    return all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_a_step_with_nan_gradients_is_skipped_everywhere_and_its_place_is_named(plain):
    for number, rank in enumerate(plain):
        assert not tensors_are_equal(rank["weights"][0], rank["weights"][1])  # an update changes weights
        assert tensors_are_equal(rank["weights"][1], rank["weights"][2])
        assert tensors_are_equal(rank["biases"][1], rank["biases"][2])
        assert not tensors_are_equal(rank["weights"][2], rank["weights"][3])
        assert not any(weight.isnan().any() for weight in rank["weights"][3])
        assert [taken["skipped"] for taken in rank["skipped"]] == [0, 0, 2, 0]  # two mini batches
        fault = {"parameters": 1, "nearest": "decoder.layers.3.mlp.router.weight"} if number == 1 else None
        assert rank["skipped"][2]["fault"] == fault
        assert all(math.isnan(norm) for norm in rank["metrics"][2]["actor/grad_norm"])
    assert plain[0]["weights"][1][0].equal(plain[1]["weights"][1][0])  # the embedding: both ranks have it


def test_adam_has_the_given_betas(plain):
    assert {group for rank in plain for group in rank["adam"]} == {(0.9, 0.95, 1e-8)}


def test_the_correction_bias_moves_by_its_rate_towards_experts_with_few_tokens(plain):
    for calls in zip(*(rank["tokens"] for rank in plain), strict=True):
        for call in calls:
            assert call["all"].equal(sum(each["own"] for each in calls)) and call["rate"] == 0.01
            sign = (call["all"].mean(-1, keepdim=True) - call["all"]).sign()
            assert (call["after"] - call["before"] - 0.01 * sign).abs().max() < 1e-6 and sign.abs().sum() > 0
    first, second = (plain[0]["biases"][number] for number in (0, 1))
    assert not tensors_are_equal(first, second) and tensors_are_equal(second, plain[1]["biases"][1])


def test_overlapped_expert_exchange_counts_tokens_of_the_update_alone(updates, plain):
    """Check this because MindSpeed enables gradients in the pass for old log-probs, where the router would count."""
    found = updates(LAYOUTS["ep2"], {**KEYS, "moe_alltoall_overlap_comm": True})
    for there, here in zip(plain, found, strict=True):
        for a, b in zip(there["metrics"][:2], here["metrics"], strict=True):
            assert norms_are_near(b["actor/grad_norm"], a["actor/grad_norm"], 1e-6)
        counted = [call["all"].sum() for call in here["tokens"]]
        assert counted == [call["all"].sum() for call in there["tokens"][: len(counted)]] and len(counted) == 4
        assert all(tensors_are_equal(a, b) for a, b in zip(there["biases"][:2], here["biases"], strict=True))


def test_the_reference_has_a_micro_batch_of_its_own(updates):
    (found,) = updates((1, {}), job="reference_job", arguments=())
    assert [passes for _, passes in found.values()] == [8, 4, 1]
    for log_probs, _ in found.values():
        assert (log_probs - found[1][0]).abs().max() < 1e-5
