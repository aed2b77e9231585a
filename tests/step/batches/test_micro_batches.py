"""Test micro batches: complete, within size and budget, and equally long on all replicas."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.step.batches.lengths import lognormal_lengths
from verl_patches.layout.parallel import parse_layout
from verl_patches.step.batches.batch_plan import (
    arrival_batches,
    balanced_batches,
    expert_group_replicas,
    mini_batches,
    packed_batches,
    token_cost,
)

ONE = st.just(1)


def flat(replicas):
    return [sample for batches in replicas for batch in batches for sample in batch]


@st.composite
def mini_batch_cases(draw, size=ONE):
    """Draw (share, lengths, micro batch size): one mini batch by replica."""
    replicas, micro = draw(st.integers(1, 6)), draw(size)
    each = micro * draw(st.integers(1, 8))
    lengths = draw(st.lists(st.integers(1, 4096), min_size=replicas * each, max_size=replicas * each))
    return [range(r * each, (r + 1) * each) for r in range(replicas)], lengths, micro


@given(mini_batch_cases(size=st.integers(1, 4)))
def test_every_sample_is_once_in_a_micro_batch_of_the_size(case):
    mini_batch, lengths, micro = case
    found = balanced_batches(mini_batch, lengths, micro)
    assert sorted(flat(found)) == list(range(len(lengths)))
    assert [len(batches) for batches in found] == [len(mini_batch[0]) // micro] * len(mini_batch)
    assert {len(batch) for batches in found for batch in batches} == {micro}


@settings(max_examples=40)
@given(st.integers(2, 3), st.integers(2, 3), st.data())
def test_no_assignment_of_single_samples_costs_less(replicas, steps, data):
    steps = 2 if replicas * steps > 6 else steps
    lengths = data.draw(st.lists(st.integers(1, 50), min_size=replicas * steps, max_size=replicas * steps))
    mini_batch = [range(r * steps, (r + 1) * steps) for r in range(replicas)]
    best = min(
        sum(max(lengths[s] for s in order[at : at + replicas]) for at in range(0, len(order), replicas))
        for order in itertools.permutations(range(len(lengths)))
    )
    assert token_cost(balanced_batches(mini_batch, lengths, 1), lengths) == (best, sum(lengths) / replicas)


# train replicas, replicas of an expert group, samples of a micro batch (None: a token budget), coefficient of variation
# of the lengths, bound of the most tokens over the mean
FACTORS = [
    *((8, 8, 1, cv, 1.005) for cv in (0.4, 0.55, 0.7)),
    *((64, 8, 1, cv, 1.005) for cv in (0.4, 0.55, 0.7)),
    *((64, 64, 1, cv, 1.015) for cv in (0.4, 0.55, 0.7)),  # no plan reaches a lower bound
    *((64, 64, None, cv, 1.006) for cv in (0.4, 0.55, 0.7)),
    *((64, 8, None, cv, 1.005) for cv in (0.4, 0.55, 0.7)),
    (64, 64, 4, 0.7, 1.005),
]


@pytest.mark.parametrize(("replicas", "group_replicas", "micro", "cv", "bound"), FACTORS)
def test_at_the_256_die_batch_replicas_are_equal(replicas, group_replicas, micro, cv, bound):
    lengths = lognormal_lengths(512 * 16, cv, seed=1)
    (mini_batch,) = mini_batches(len(lengths), replicas, len(lengths))
    if micro is None:
        found = packed_batches(mini_batch, lengths, 8192, group_replicas=group_replicas)
    else:
        found = balanced_batches(mini_batch, lengths, micro, group_replicas)
    most, equal = token_cost(found, lengths, group_replicas)
    totals = [sum(lengths[s] for batch in batches for s in batch) for batches in found]
    assert most / equal <= bound and max(totals) - min(totals) < max(lengths)
    most, _ = token_cost(arrival_batches(mini_batch, micro or 1), lengths, group_replicas)
    assert most / equal > (1.2 if micro == 4 else 1.4)  # negative control
    if group_replicas < replicas:  # control: a plan for one group of all replicas
        assert token_cost(balanced_batches(mini_batch, lengths, 1), lengths)[0] / equal > 1.01


@pytest.mark.parametrize(("words", "replicas"), [
    ("tp4 pp8 ep32 etp1 @256", 8),  # the 256-die runs
    ("tp4 pp8 ep32 etp1 @2048", 8),
    ("tp2 ep2 etp2 @8", 2),
    ("tp4 ep2 etp1 @8", 1),
    ("tp1 cp2 ep4 @8", 2),
    ("tp1 cp4 ep2 @8", 1),
])  # fmt: skip
def test_an_expert_group_has_the_replicas_whose_ranks_hold_its_experts(words, replicas):
    train = parse_layout(words)
    groups = [{train.coordinates(rank).dp for rank in group} for group in train.groups("etp-ep")]
    apart = [range(at, at + replicas) for at in range(0, train.dp, replicas)]
    assert expert_group_replicas(train) == replicas
    assert all(any(group <= set(own) for own in apart) for group in groups)
    assert max(map(len, groups)) == replicas


@given(mini_batch_cases(), st.integers(0, 4096), st.booleans())
def test_packed_micro_batches_keep_the_budget_and_are_equally_many(case, room, balance):
    mini_batch, lengths, _ = case
    budget = max(lengths) + room
    found = packed_batches(mini_batch, lengths, budget, balance=balance)
    assert sorted(flat(found)) == list(range(len(lengths)))
    assert len({len(batches) for batches in found}) == len({sum(map(len, batches)) for batches in found}) == 1
    tokens = [sum(lengths[s] for s in batch) for batches in found for batch in batches]
    assert 0 < min(tokens) and max(tokens) <= budget
    if not balance:
        assert [sorted(s for batch in batches for s in batch) for batches in found] == [list(own) for own in mini_batch]


@pytest.mark.parametrize("minis", [1, 8])
def test_a_pass_over_balanced_mini_batches_is_as_equal_without_moving_samples(minis):
    lengths = lognormal_lengths(8192, 0.7, seed=2)
    dealt = [packed_batches(mini_batch, lengths, 8192) for mini_batch in mini_batches(8192, 8, 8192 // minis)]
    placed = [[s for mini in dealt for batch in mini[replica] for s in batch] for replica in range(8)]
    (arrived,) = mini_batches(8192, 8, 8192)
    for shares_of_replicas, fits in ((placed, True), (arrived, False)):
        most, equal = token_cost(packed_batches(shares_of_replicas, lengths, 16384, balance=False), lengths)
        assert (most / equal <= 1.02) == fits


def test_a_sample_longer_than_the_budget_is_refused():
    with pytest.raises(AssertionError, match="above the budget"):
        packed_batches([range(2)], [5, 12], 11)


def test_samples_without_tokens_leave_no_micro_batch_empty():
    """Check that each micro batch of a replica has work, though the number is another replica's."""
    batches = packed_batches([range(2), range(2, 4)], [0, 0, 5, 5], 5, balance=False)
    assert [[len(batch) for batch in own] for own in batches] == [[1, 1], [1, 1]]
