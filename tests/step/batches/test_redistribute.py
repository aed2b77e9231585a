"""The exchange between rollout ranks and train replicas, on gloo."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.step.batches import cache_jobs
from tests.step.batches.lengths import lognormal_lengths
from tests.step.batches.strategies import steps

STEP = dict(replica_of=[0, 1, 0, 1], lengths=lognormal_lengths(16, 0.7, seed=1), mini_batch_size=8, micro_batch_size=2)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=steps(worlds=st.just(4)))
def test_all_bits_arrive_as_planned_in_one_collective(ranks4, arguments):
    for arrived, calls, wire, names in ranks4.run(cache_jobs.redistribute, arguments):
        assert arrived and calls == [["all_to_all_single", *wire]] and names == ()


def test_a_wrong_order_would_be_seen(ranks4):
    assert not any(ranks4.run(cache_jobs.disordered, STEP))


@pytest.mark.parametrize(("how", "own", "others"), [
    ("nothing", "no error", "no error"),
    ("missing", "CacheError: tensor cache: there is no responses of 4 samples, the first is 8; it has",
     "ExchangeError: exchange: rank(s) [2] had nothing to send"),
    ("short", "(sample, values, expected) [(", "rank(s) [2] had nothing to send"),
    ("dtype", "ExchangeError: exchange: prompts is torch.int64 of ", "rank(s) [2] had nothing"),
    ("memory", "OutOfMemoryError: no memory is left", "ExchangeError: exchange: rank(s) [2] had nothing to send"),
    ("names", "has another plan or other tensors than rank(s) [0, 1, 3]", "tensors than rank(s) [2]"),
])  # fmt: skip
def test_one_odd_rank_stops_all_and_none_waits(ranks4, how, own, others):
    for rank, (error, names) in enumerate(ranks4.run(cache_jobs.spoilt, STEP, how, 2)):
        assert (own if rank == 2 else others) in error and names == ()
