"""Test the exchange between rollout ranks and train replicas, on gloo."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.step.batches import cache_jobs
from tests.step.batches.lengths import lognormal_lengths
from tests.step.batches.strategies import steps

STEP = dict(
    replica_by_rank=[0, 1, 0, 1], lengths=lognormal_lengths(16, 0.7, seed=1), mini_batch_size=8, micro_batch_size=2
)


@pytest.mark.slow
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=steps(worlds=st.just(4)))
def test_all_bits_arrive_as_planned_in_one_collective_a_tensor(ranks4, arguments):
    for arrived, calls, wire, names in ranks4.run(cache_jobs.redistribute, arguments):
        kinds, sent, received = zip(*calls, strict=True)
        assert arrived and kinds == ("all_reduce", *["all_to_all_single"] * 3) and names == ()
        assert (sum(sent), sum(received)) == tuple(wire)


def test_a_wrong_order_would_be_seen(ranks4):
    assert not any(ranks4.run(cache_jobs.disordered, STEP))


@pytest.mark.parametrize(("fault", "words"), [
    ("nothing", "no error"),
    ("missing", "rank 2: RecipeError: tensor cache: 4 samples have no responses (the first is sample 8);"),
    ("short", "rank 2: log_probs has torch.float32 ("),
    ("dtype", "rank 2: prompts has torch.int64 ("),
])  # fmt: skip
def test_one_odd_rank_stops_all_and_none_waits(ranks4, fault, words):
    for error, names in ranks4.run(cache_jobs.spoilt, STEP, fault, 2):
        assert words in error and names == ()
