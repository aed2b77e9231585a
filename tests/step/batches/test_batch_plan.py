"""Test the batch plan: every sample once, verl's mini batches, and sends that equal receives."""

import itertools

import pytest
from hypothesis import given

from tests.step.batches.strategies import steps
from verl_patches.step.batches.batch_plan import plan_batch


@given(arguments=steps())
def test_every_sample_is_placed_once_in_the_mini_batch_that_verl_gives_it(arguments):
    plan, again = plan_batch(**arguments), plan_batch(**arguments)
    assert plan == again
    samples, replicas = len(arguments["lengths"]), max(arguments["replica_by_rank"]) + 1
    assert sorted(itertools.chain(*plan.replica_samples)) == list(range(samples))
    assert len({len(placed) for placed in plan.replica_samples}) == 1
    assert len({tuple(map(len, minis)) for minis in plan.schedule}) == 1  # as many micro batches on every replica
    local, mini = samples // replicas, arguments["mini_batch_size"] // replicas
    for number, mini_batch in enumerate(zip(*plan.schedule, strict=True)):
        expected = {r * local + number * mini + i for r in range(replicas) for i in range(mini)}
        assert {s for one in mini_batch for micro in one for s in micro} == expected


@given(arguments=steps())
def test_a_rank_sends_the_samples_that_its_peer_expects(arguments):
    plan, world = plan_batch(**arguments), len(arguments["replica_by_rank"])
    assert [s for held in plan.rollout_samples for s in held] == list(range(len(arguments["lengths"])))
    sends, receives = ([way(rank) for rank in range(world)] for way in (plan.sent_samples, plan.received_samples))
    for a, b in itertools.product(range(world), repeat=2):
        assert sends[a][b] == receives[b][a] and set(sends[a][b]) <= set(plan.rollout_samples[a])
    for rank in range(world):
        assert sorted(itertools.chain(*receives[rank])) == sorted(plan.replica_samples[plan.replica_by_rank[rank]])


def test_without_balance_each_replica_computes_its_own_share_in_order():
    plan = plan_batch([0], [1] * 12, mini_batch_size=6, micro_batch_size=2, balance=False)
    assert plan.schedule == ((((0, 1), (2, 3), (4, 5)), ((6, 7), (8, 9), (10, 11))),)
    two = plan_batch([0, 1], [1] * 8, mini_batch_size=4, micro_batch_size=1, balance=False)
    assert two.token_cost([5, 1, 1, 1, 1, 2, 1, 1]) == (9, 6.5)  # the longer of two replicas in each step, and the mean
    assert two.replica_samples == ((0, 1, 2, 3), (4, 5, 6, 7)) and two.schedule[1] == (((4,), (5,)), ((6,), (7,)))


def test_the_longest_samples_are_together_in_the_first_micro_batch():
    fits = dict(replica_by_rank=[0, 1], lengths=[1, 9, 2, 8, 3, 7, 4, 6], mini_batch_size=8)
    assert plan_batch(**fits, micro_batch_size=2).schedule[0][0][0] == (1, 7)


@pytest.mark.parametrize("size", [5, 1])
def test_mini_batches_that_do_not_divide_are_refused(size):
    with pytest.raises(AssertionError):
        plan_batch([0, 1], [1] * 8, mini_batch_size=size, micro_batch_size=1)
