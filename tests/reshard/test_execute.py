"""The executor on gloo ranks: random pairs of layouts bit for bit, what it refuses on every rank, and its memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.reshard import spoilt
from tests.reshard.cases import TINY, Case, sync_and_compare
from tests.reshard.pairs import pairs
from verl_patches.layout.parallel import parse_layout, rollout_layout

# not derandomized: every run sees other pairs; a failing case is printed whole, so shrinking it is not worth the time
RANDOM = settings(
    max_examples=15,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    print_blob=True,
    derandomize=False,
    suppress_health_check=list(HealthCheck),
)
PLAIN = Case(TINY, parse_layout("tp2 pp2 ep2 etp1 @4 layers=1,2"), rollout_layout(1, dp=2, tp=2), bucket_bytes=1 << 11)
FIRST = "model.embed_tokens.weight"


@pytest.mark.slow
@RANDOM
@given(case=pairs(4))
def test_random_pairs_on_4_ranks(ranks4, case):
    ranks4.run(sync_and_compare, case)


@pytest.mark.slow
@RANDOM
@given(case=pairs(8))
def test_random_pairs_on_8_ranks(ranks8, case):
    ranks8.run(sync_and_compare, case)


def test_one_wrong_bit_would_be_seen(ranks4):
    assert ranks4.run(spoilt.with_a_bit_flipped, PLAIN) == [[], [], [], ["model.norm.weight"]]


def test_report_counts_what_the_plan_says(ranks4):
    plan = PLAIN.plan()
    reports = [outcome.report for outcome in ranks4.run(sync_and_compare, PLAIN)]
    assert plan.bucket_count > 1
    assert {report.collectives for report in reports} == {plan.bucket_count + 2}
    assert [report.local_bytes for report in reports] == plan.local_bytes
    assert [report.received_bytes for report in reports] == plan.lower_bound_bytes
    assert sum(report.sent_bytes for report in reports) == sum(plan.lower_bound_bytes)
    assert all({"pack", "exchange", "unpack", "total"} <= set(report.as_dict()["seconds"]) for report in reports)


def test_whole_tensors_are_put_together_for_load_weights(ranks4):
    names = (FIRST, "model.layers.1.mlp.experts.3.down_proj.weight", "model.norm.weight")
    outcomes = ranks4.run(sync_and_compare, replace(PLAIN, whole=names))
    assert all(outcome.verified.unverified == tuple(sorted(names)) for outcome in outcomes)


@pytest.mark.parametrize("spoil", sorted(spoilt.SPOILERS))
def test_a_spoilt_plan_is_refused_on_every_rank_by_name(ranks4, spoil):
    messages = ranks4.run(spoilt.with_plan, PLAIN, spoil)
    assert len(set(messages)) == 1
    said = {
        "nothing": "fine",
        "removed": "expected once by the plan, found never written",
        "duplicated": "expected once by the plan, found written twice or more",
        "removed by the sender": "as region 0 of bucket",
        "ranks swapped": "found never written",
        "receivers swapped": "ranks do not have the same plan",
        "a bucket less": "buckets, rank 2 has",
    }[spoil]
    assert said in messages[0]
    assert spoil in ("nothing", "a bucket less") or (".weight[" in messages[0] and "rank " in messages[0]), messages[0]


def test_ranks_that_planned_differently_are_told_so(ranks4):
    case = replace(PLAIN, bucket_bytes=1 << 20)  # all in one bucket, with 16 bytes more too
    messages = ranks4.run(spoilt.planned_differently, case)
    assert len(set(messages)) == 1
    assert "rank 1: its plan has the digest" in messages[0]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("unmapped", f"rank 1: {FIRST}[64:72] arrives, but is unmapped: no live parameter takes it"),
        ("half mapped", f"rank 1: {FIRST}[65:72] arrives, but is unmapped"),
        ("too much", "rank 1: model.layers.0.mlp.never.weight is not in the inventory"),
        ("shape", f"in {FIRST}: expected shape (8, 8), found (3, 5)"),
        ("not trained", "expected to train it, found that it trains nothing of that tensor"),
        ("nothing", "fine"),
    ],
)
def test_memory_that_does_not_fit_is_refused_on_every_rank_by_name(ranks4, spoil, said):
    messages = ranks4.run(spoilt.with_memory, PLAIN, spoil)
    assert len(set(messages)) == 1
    assert said in messages[0]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [("pack", "rank 1: ValueError: cannot be packed"), ("load", f"rank 1: KeyError: '{FIRST}'"),
     ("offloaded", f"rank 1: RuntimeError: {FIRST} and 0 more have no device memory")],
)  # fmt: skip
def test_an_error_of_one_rank_stops_all_and_the_next_sync_is_well(ranks4, spoil, said):
    case = replace(PLAIN, whole=(FIRST,) if spoil == "load" else ())
    for first, second, memory_in_use in ranks4.run(spoilt.while_running, case, spoil):
        assert said in first
        assert (second, memory_in_use) == ("fine", "0")


def test_peak_is_what_the_allocator_sees_and_within_four_buckets(ranks4):
    case = replace(PLAIN, model=replace(TINY, hidden_size=256, vocab_size=2048), bucket_bytes=1 << 17)
    case = replace(case, rollout_dtype="float32")
    for seen, said, left, held in ranks4.run(spoilt.peak_while_running, case):
        assert 4096 < said <= 4 * case.bucket_bytes
        assert said <= seen <= said + 4096  # flags, and what torch keeps beside them
        assert left == 0 < held <= said
    assert case.plan().bucket_count > 4
