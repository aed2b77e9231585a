import itertools

import pytest
from hypothesis import given, settings

from tests.tensor_cache.lengths import lognormal_lengths
from tests.tensor_cache.strategies import steps
from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import parse_layout
from verl_patches.tensor_cache.batch_plan import held_after_rollout, mini_batches, plan_batch, train_replicas


@settings(deadline=None)
@given(arguments=steps())
def test_every_sample_is_placed_once_and_the_plan_is_reproducible(arguments):
    plan = plan_batch(**arguments)
    assert sorted(plan.order) == list(range(len(arguments["lengths"])))
    assert len({len(mine) for mine in plan.placed}) == 1
    assert len({tuple(map(len, mine)) for mine in plan.schedule}) == 1  # as many micro batches on every replica
    again = plan_batch(**arguments)
    assert (plan, plan.digest) == (again, again.digest)


@settings(deadline=None)
@given(arguments=steps())
def test_mini_batches_hold_the_samples_that_verl_gives_them(arguments):
    plan = plan_batch(**arguments)
    samples, replicas = len(arguments["lengths"]), max(arguments["replica_of"]) + 1
    local, mini = samples // replicas, arguments["mini_batch_size"] // replicas
    for number, of_replicas in enumerate(zip(*plan.schedule, strict=True)):
        expected = {r * local + number * mini + at for r in range(replicas) for at in range(mini)}
        assert {s for one in of_replicas for micro in one for s in micro} == expected


@settings(deadline=None)
@given(arguments=steps())
def test_what_a_rank_sends_is_what_its_peer_expects(arguments):
    plan = plan_batch(**arguments)
    world = len(plan.held)
    sends, receives = ([way(rank) for rank in range(world)] for way in (plan.sends, plan.receives))
    for a, b in itertools.product(range(world), repeat=2):
        assert sends[a][b] == receives[b][a]
        assert set(sends[a][b]) <= set(plan.held[a])
    for rank in range(world):
        assert sorted(s for each in receives[rank] for s in each) == sorted(plan.placed[plan.replica_of[rank]])


def test_a_rank_keeps_what_it_holds_and_holders_take_turns():
    held = held_after_rollout(4, [0, 0, 1, 1])  # two rollout replicas of two ranks that both hold what they made
    plan = plan_batch(held, [0, 1, 0, 1], [5, 1, 9, 3], mini_batch_size=4, micro_batch_size=1)
    for rank, peers in enumerate(map(plan.receives, range(4))):
        mine = plan.placed[plan.replica_of[rank]]
        assert sorted(peers[rank]) == sorted(set(mine) & set(held[rank]))
    senders = {peer for rank in (2, 3) for peer, got in enumerate(plan.receives(rank)) if peer in (0, 1) and got}
    assert senders == {0, 1}


def test_without_balance_each_replica_computes_its_own_share_in_order():
    plan = plan_batch([range(12)], [0], [1] * 12, mini_batch_size=6, micro_batch_size=2, balance=False)
    assert plan.schedule == ((((0, 1), (2, 3), (4, 5)), ((6, 7), (8, 9), (10, 11))),)
    two = plan_batch([range(8), ()], [0, 1], [1] * 8, mini_batch_size=4, micro_batch_size=1, balance=False)
    assert two.placed == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert two.schedule[1] == (((4,), (5,)), ((6,), (7,)))


def test_token_mean_moves_micro_batches_whole_and_others_do_not():
    arguments = dict(
        held=[range(8), ()], replica_of=[0, 1], lengths=[1, 9, 2, 8, 3, 7, 4, 6], mini_batch_size=8, micro_batch_size=2
    )
    pairs = {micro for mine in plan_batch(**arguments).schedule for mini in mine for micro in mini}
    assert pairs == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert plan_batch(**arguments, loss_agg_mode="seq-mean-token-mean").schedule[0][0][0] == (1, 7)


def test_the_256_die_step():
    train = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")
    lengths = lognormal_lengths(512 * 16, 0.55, seed=5)
    held = held_after_rollout(len(lengths), range(256))
    plan = plan_batch(held, train_replicas(train), lengths, mini_batch_size=512 * 16, micro_batch_size=1)
    assert len(plan.schedule) == 8
    assert len(plan.schedule[0][0]) == 1024
    most, equal = plan.tokens(lengths)
    assert most / equal <= 1.02
    assert sum(map(len, plan.sends(17))) == 32 * 32  # each of its 32 samples goes to the 32 ranks of one replica
    assert sum(map(len, plan.receives(17))) == 1024
    assert plan.receives(17)[3] == plan.sends(3)[17]


@pytest.mark.parametrize(("change", "says"), [
    (dict(micro_batch_size=None), "micro_batch_size or token_budget"),
    (dict(token_budget=9), "micro_batch_size or token_budget"),
    (dict(mini_batch_size=5), "8 samples in mini batches of 5 over 2 train replicas"),
    (dict(mini_batch_size=1), "mini batches of 1 over 2"),
    (dict(micro_batch_size=3), "multiples of the micro batch size 3"),
    (dict(held=[range(8), range(1, 9)]), "1 held by none or unknown, the first is 8"),
    (dict(held=[range(7), ()]), "the first is 7"),
    (dict(held=[[*range(8), 0], ()]), "rank 0 holds a sample twice"),
    (dict(replica_of=[0, 2]), r"train replicas are \[0, 2\]"),
    (dict(held=[range(8)]), "1 ranks hold samples, 2 train"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(change, says):
    fits = dict(held=[range(8), ()], replica_of=[0, 1], lengths=[1] * 8, mini_batch_size=4, micro_batch_size=1)
    plan_batch(**fits)
    with pytest.raises(ConfigError, match=says):
        plan_batch(**fits | change)


def test_mini_batches_of_two_replicas():
    assert mini_batches(8, 2, 4) == [[range(2), range(4, 6)], [range(2, 4), range(6, 8)]]
