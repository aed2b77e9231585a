"""Test how often two data-parallel ranks of an emulated engine agree, with graphs of torchair on (not traced)."""

import pytest

from tests.rollout.test_ascend import TREES, models  # noqa: F401  a fixture

pytestmark = [pytest.mark.slow, pytest.mark.upstream]
MAX_LOGP_ERROR = 1e-5
GRAPHS = {
    "torchair_graph_config": {"enabled": True, "graph_batch_sizes": [1, 2, 4, 8]},
    "chunked_prefill_for_mla": True,
}
REQUESTS = {
    "uneven": {"lengths": [[140, 60, 30, 20, 17, 150], []], "tokens": [[14, 12, 14, 6, 10, 13], []]},
    "even": {"lengths": [[140, 20, 40], [30, 131]], "tokens": [[14, 12, 9], [14, 13]]},
    "none": {"lengths": [[], []], "tokens": [[], []]},
}
TWO_SYNCS = {"without": ["rollout.ascend_dp_sync"]}


@pytest.fixture(scope="module")
def found(run_emulated, models):  # noqa: F811
    """Return {name: (each rank's findings with the row, and without it)}."""
    rounds = [round for spec in REQUESTS.values() for round in (spec, spec | TWO_SYNCS)]
    arguments = models["256 experts"], 2, 1, rounds, {"additional_config": {"refresh": True, **GRAPHS}}
    where = {"trees": TREES, "env": {"TORCHDYNAMO_DISABLE": "1"}, "size": 2}
    pairs = zip(*run_emulated("tests.rollout.dp_sync_rank:rounds", *arguments, **where), strict=True)
    return {name: (list(next(pairs)), list(next(pairs))) for name in REQUESTS}


@pytest.mark.parametrize(("name", "steps"), [("uneven", 14), ("even", 14), ("none", 0)])
def test_data_parallel_ranks_agree_once_a_step_and_give_the_same(found, name, steps):
    """Test row rollout.ascend_dp_sync and the same round without it; one more sync tells that no rank has requests."""
    one, two = found[name]
    assert [(rank["steps"], rank["syncs"]) for rank in one] == [(steps, steps + 1)] * 2
    assert [(rank["steps"], rank["syncs"]) for rank in two] == [(steps, 2 * steps + 1)] * 2
    for rank, expected in zip(one, two, strict=True):
        for (tokens, log_probs), (others, theirs) in zip(rank["responses"], expected["responses"], strict=True):
            assert tokens == others and log_probs == pytest.approx(theirs, abs=MAX_LOGP_ERROR)
