"""Test micro batches of line a3: dynamic, packed or padded, split over CP ranks, by verl's worker in fp32.

Samples have unequal lengths; the plain run has micro batches of one sample.
"""

from __future__ import annotations

import pytest

from tests.model.mindspeed_start import CONTEXT_PARALLEL_LAYOUTS, LAYOUTS
from tests.near_ties import assert_all_but_few_below, norm_tolerance

pytestmark = [pytest.mark.slow, pytest.mark.upstream]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PLAIN = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1"]
PLAIN += [f"{ACTOR}.entropy_coeff=0.01"]
DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=420"]
DYNAMIC += [f"{ROLLOUT}.log_prob_max_token_len_per_gpu=900"]


@pytest.fixture(scope="session")
def run_batches(run_a3):
    """Return run_batches(layout, more, ...), which returns the findings of mindspeed_job.py by rank."""

    def run(layout=(1, {}), more=(), boundaries=True, off="") -> list:
        return run_a3("mindspeed_job:batches_job", layout, boundaries, off=off, more=[*PLAIN, *more])

    return run


@pytest.fixture(scope="session")
def plain(run_batches):
    return run_batches()[0]


def assert_same(found, plain, whole=True):
    """Assert equal log-probs and entropy within 1e-5 before an update, and gradient norms within a relative 1e-5.

    After an update they are within 5e-4 except for a few, and weights, where a rank has `whole` ones, within 1e-4: Adam
    makes steps of up to 1e-3 of gradients that are only rounding.
    """
    assert len(plain["grad_norm"]) == len(plain["log_probs"]) == 2
    for name in ("log_probs", "entropy"):
        before, after = (
            (here - there[found["samples"]])[found["mask"]].abs()
            for there, here in zip(plain[name], found[name], strict=True)
        )
        assert before.max() < 1e-5, name
        assert_all_but_few_below(after, 5e-4)
    for update, (norm, expected) in enumerate(zip(found["grad_norm"], plain["grad_norm"], strict=True), 1):
        assert norm == pytest.approx(expected, rel=norm_tolerance(update, 1e-5)), update
    for there, here in zip(plain["weights"], found["weights"], strict=True) if whole else ():
        assert max((a - b).abs().max() for a, b in zip(there, here, strict=True)) < 1e-4


def token_counts(shapes) -> list[int]:
    return [batch * width for batch, width in shapes]


@pytest.mark.parametrize("layout", ["tp1", "ep2", "pp2_uneven"])
def test_dynamic_micro_batches_give_the_same_updates(run_batches, plain, layout):
    every = run_batches(LAYOUTS[layout], DYNAMIC)
    for found in every:
        assert_same(found, plain, whole=layout == "tp1")
        if not found["first_stage"]:
            continue
        before, update = map(token_counts, found["shapes"][:2])
        share = sorted(token_counts(plain["shapes"][0])[number] for number in found["samples"])
        assert sum(before) == sum(update) == sum(share)
        assert len(before) < len(update) < len(share)  # log-probs have the larger token budget
        assert max(update) < 1.3 * sum(update) / len(update)  # balanced by tokens
    assert len({len(found["shapes"][1]) for found in every}) == 1  # each exchanges experts with the others


def test_without_their_weights_dynamic_micro_batches_give_other_updates(run_batches, plain):
    """Run the negative control; also, without a patch verl's micro batches have a fixed size."""
    (found,) = run_batches(more=DYNAMIC, off=",-update.sample_weights")
    assert abs(found["grad_norm"][0] / plain["grad_norm"][0] - 1) > 1e-3


def test_packed_sequences_of_a_micro_batch_do_not_see_each_other(run_batches, plain):
    four = [f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4"]
    (found,) = run_batches(more=four)
    assert_same(found, plain)
    assert token_counts(found["shapes"][0]) == [sum(token_counts(plain["shapes"][0])[at : at + 4]) for at in (0, 4)]
    (found,) = run_batches(more=four, boundaries=False)  # negative control
    assert (found["log_probs"][0] - plain["log_probs"][0])[plain["mask"]].abs().max() > 1e-2


@pytest.mark.parametrize("layout", CONTEXT_PARALLEL_LAYOUTS)
def test_context_parallel_ranks_give_the_same_updates(run_batches, plain, layout):
    found = run_batches(CONTEXT_PARALLEL_LAYOUTS[layout], DYNAMIC if layout == "cp2_tp2_ep4" else [])
    for rank in found:
        assert_same(rank, plain, whole=False)
    parts = [sum(token_counts(rank["shapes"][0])) for rank in found]
    whole = sum(token_counts(plain["shapes"][0]))
    assert all(whole <= 2 * part <= whole + 8 * 3 for part in parts)  # 8 samples, each padded to 4
