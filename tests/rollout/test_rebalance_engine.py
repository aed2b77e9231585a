"""Test that requests give the same responses when they move between emulated engines of two data-parallel ranks.

Graphs of torchair are on (not traced), as in production. The engines start once for all rounds.
"""

import itertools

import pytest

from tests.rollout.test_ascend import TREES, models  # noqa: F401  a fixture

pytestmark = [pytest.mark.slow, pytest.mark.upstream]
MAX_LOGP_ERROR = 1e-5
GRAPHS = {
    "torchair_graph_config": {"enabled": True, "graph_batch_sizes": [1, 2, 4, 8]},
    "chunked_prefill_for_mla": True,
}
LONG_REQUESTS = {"lengths": [[140, 60, 30, 20, 17, 150], []], "tokens": [[14, 12, 14, 6, 10, 13], []]}
EVEN_REQUESTS = {"lengths": [[140, 20, 40], [30, 131]], "tokens": [[14, 12, 9], [14, 13]]}
NO_REQUESTS = {"lengths": [[], []], "tokens": [[], []]}
TWO_SYNCS = {"without": ["rollout.ascend_dp_sync"]}
ROUNDS = {
    "uneven, two syncs": {**LONG_REQUESTS, **TWO_SYNCS},
    "uneven": LONG_REQUESTS,
    "even, two syncs": {**EVEN_REQUESTS, **TWO_SYNCS},
    "no prompts": NO_REQUESTS,
    "no prompts, two syncs": {**NO_REQUESTS, **TWO_SYNCS},
    "uneven, moved": {**LONG_REQUESTS, "every": 3},
    "even": EVEN_REQUESTS,
    "even, to and fro": {**EVEN_REQUESTS, "every": 1, "plan": "to and fro"},
    "even, nothing to gain": {**EVEN_REQUESTS, "every": 2},
    "a block is lost": {**LONG_REQUESTS, "every": 3, "spoil": "drop_a_block"},
    "a generator is lost": {**LONG_REQUESTS, "every": 3, "spoil": "lose_the_generator"},
    "uneven, moved again": {**LONG_REQUESTS, "every": 4},
}
ERRORS = {  # rounds after ROUNDS, each with an error on one rank
    "fail_to_read": "rank 1: ZeroDivisionError",
    "fail_to_pack": "rank 0: ZeroDivisionError",
    "fail_to_receive": "rank 1: RebalanceError: request",
}
ROUNDS |= {name: {**LONG_REQUESTS, "every": 3, "spoil": name} for name in ERRORS}


@pytest.fixture(scope="module")
def run(run_emulated, models):  # noqa: F811
    """Return run(rounds, dp, tp), which returns each rank's findings in each round."""

    def run_rounds(rounds, dp=2, tp=1):
        arguments = models["256 experts"], dp, tp, rounds, {"additional_config": {"refresh": True, **GRAPHS}}
        where = {"trees": TREES, "env": {"TORCHDYNAMO_DISABLE": "1"}, "size": dp * tp}
        return run_emulated("tests.rollout.rebalance_rank:rounds", *arguments, **where)

    return run_rounds


@pytest.fixture(scope="module")
def found(run):
    ranks = run([*ROUNDS.values()])
    return {name: [rank[at] for rank in ranks] for at, name in enumerate(ROUNDS)}


def largest(found, expected):
    """Return the largest difference of log-probs; infinite if a token differs."""
    if [rank["tokens"] for rank in found] != [rank["tokens"] for rank in expected]:
        return float("inf")
    values = ([v for rank in ranks for each in rank["log_probs"] for v in each] for ranks in (found, expected))
    return max((abs(a - b) for a, b in zip(*values, strict=True)), default=0.0)


@pytest.mark.parametrize(("name", "steps"), [("uneven", 14), ("even", 14), ("no prompts", 0)])
def test_data_parallel_ranks_agree_once_a_step_and_give_the_same(found, name, steps):
    """Test row rollout.ascend_dp_sync and the same round without it; one more sync tells that no rank has requests."""
    one, two = found[name], found[f"{name}, two syncs"]
    assert [(rank["steps"], rank["syncs"]) for rank in one] == [(steps, steps + 1)] * 2
    assert [(rank["steps"], rank["syncs"]) for rank in two] == [(steps, 2 * steps + 1)] * 2
    assert largest(one, two) < MAX_LOGP_ERROR


def test_an_exchange_costs_one_more(found):
    """Count one sync before each of four exchanges, as holders after it are unknown; three at the end, around two."""
    assert [(rank["steps"], rank["syncs"]) for rank in found["uneven, moved"]] == [(14, 14 + 4 + 3)] * 2


@pytest.mark.parametrize("name", ["uneven, moved", "even, to and fro", "uneven, moved again"])
def test_moved_requests_give_the_same_in_the_same_order(found, name):
    expected = found[name.partition(",")[0]]
    assert largest(found[name], expected) < MAX_LOGP_ERROR
    for rank, without in zip(found[name], expected, strict=True):
        assert rank["moved"] > (10 if "to and fro" in name else 1) and not rank["left over"]
        assert rank["in order"] and (rank["reasons"], rank["widths"]) == (without["reasons"], without["widths"])


def test_nothing_moves_where_no_tier_is_lowered(found):
    assert [rank["moved"] for rank in found["even, nothing to gain"]] == [0, 0]
    assert largest(found["even, nothing to gain"], found["even"]) < MAX_LOGP_ERROR


@pytest.mark.parametrize("name", ["a block is lost", "a generator is lost"])
def test_they_do_not_without_a_block_or_the_state_of_a_generator(found, name):
    assert largest(found[name], found["uneven"]) > 100 * MAX_LOGP_ERROR


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_on_one_rank_is_that_of_all(found, name):
    first, second = found[name]
    assert first["error"] == second["error"] and first["error"].startswith("rollout rebalance: ")
    assert ERRORS[name] in first["error"]


@pytest.mark.nightly
def test_requests_move_in_both_ranks_of_a_tensor_parallel_group(run):
    found = list(zip(*run([LONG_REQUESTS, {**LONG_REQUESTS, "every": 3}], tp=2), strict=True))
    without, moved = (ranks[::2] for ranks in found)
    assert largest(moved, without) < MAX_LOGP_ERROR and all(rank["moved"] > 1 for rank in itertools.chain(*found[1:]))
