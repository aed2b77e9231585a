"""Test the executor on gloo ranks: random pairs of layouts bit for bit, refusals on every rank, and its memory."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.reshard import spoilt
from tests.reshard.cases import FIRST, PLAIN, sync_and_compare
from tests.reshard.pairs import pairs

# not derandomized: every run sees other pairs; shrinking a failing case is not worth the time
RANDOM = settings(
    max_examples=15, deadline=None, database=None, phases=[Phase.generate], print_blob=True, derandomize=False,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip


@pytest.mark.slow
@RANDOM
@given(case=pairs([4]))
def test_random_pairs_on_4_ranks(ranks4, case):
    ranks4.run(sync_and_compare, case)


@pytest.mark.slow
@RANDOM
@given(case=pairs([8]))
def test_random_pairs_on_8_ranks(ranks8, case):
    ranks8.run(sync_and_compare, case)


def test_one_wrong_bit_would_be_seen(ranks4):
    assert ranks4.run(spoilt.flip_one_bit, PLAIN) == [[], [], [], ["model.norm.weight"]]


def test_report_equals_the_plan(ranks4):
    plan, (reports, elements) = PLAIN.plan(), zip(*ranks4.run(sync_and_compare, PLAIN), strict=True)
    assert plan.bucket_count > 1
    assert {report.collectives for report in reports} == {plan.bucket_count}
    assert [report.local_bytes for report in reports] == plan.local_bytes
    assert [report.received_bytes for report in reports] == plan.lower_bound_bytes
    assert sum(report.sent_bytes for report in reports) == sum(plan.lower_bound_bytes)
    assert min(elements) > 0


@pytest.mark.parametrize(("function", "spoil", "expected"), [
    (spoilt.build_with_plan, "nothing", "fine"),
    (spoilt.build_with_plan, "removed", "expected one write by the plan, found none"),
    (spoilt.build_with_plan, "duplicated", "expected one write by the plan, found two or more"),
    (spoilt.build_with_plan, "ranks swapped", "expected one write by the plan, found none"),
    (spoilt.build_with_unequal_plans, "bucket", "ranks have different plans: rank 0 has the digest"),
    (spoilt.build_with_unequal_plans, "rollout", ", rank 1 has the digest"),
    (spoilt.build_with_memory, "nothing", "fine"),
    (spoilt.build_with_memory, "unmapped", f"rank 1: {FIRST}[64:72] is sent to this rank, but no rollout"),
    (spoilt.build_with_memory, "half mapped", f"rank 1: {FIRST}[65:72] is sent to this rank, but no"),
    (spoilt.build_with_memory, "too much", "rank 1: model.layers.0.mlp.never.weight is not in the inventory"),
    (spoilt.build_with_memory, "shape", f"in {FIRST}: expected shape (8, 8), found (3, 5)"),
    (spoilt.build_with_memory, "not trained", "but trains none of it"),
    (spoilt.check_wrong_bytes, "nothing", "fine"),
    (spoilt.check_wrong_bytes, "NaN in training", "fine"),
    (spoilt.check_wrong_bytes, "left out", "with 32 NaN"),
    (spoilt.check_wrong_bytes, "transposed", "rank 2 (model.layers."),
    (spoilt.check_wrong_bytes, "swapped", "2 of 119 regions"),
    (spoilt.check_wrong_bytes, "last value", f"rank 2 ({FIRST}) checksum"),
    (spoilt.check_wrong_bytes, "replicas differ", "(training) checksum"),
])  # fmt: skip
def test_an_error_of_plan_memory_or_bytes_is_named_on_every_rank(ranks4, function, spoil, expected):
    messages = ranks4.run(function, PLAIN, spoil)
    assert len(set(messages)) == 1
    assert expected in messages[0]


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [("pack", "rank 1: ValueError: cannot be packed"),
     ("offloaded", f"rank 1: RuntimeError: {FIRST} and 0 more have no device memory")],
)  # fmt: skip
def test_an_error_of_one_rank_stops_all_and_the_next_sync_is_well(ranks4, spoil, expected):
    for first, second, allocated in ranks4.run(spoilt.fail_first_sync, PLAIN, spoil):
        assert expected in first
        assert (second, allocated) == ("fine", 0)


@pytest.mark.parametrize("spoil", ["nothing", "transposed", "exchanged"])
def test_a_wrong_map_is_found_by_loading_again(ranks4, spoil):
    for problems in ranks4.run(spoilt.check_wrong_map, PLAIN, spoil):
        names = [text.split(" on rank ")[0] for text in problems]
        assert names == ([] if spoil == "nothing" else ["model.layers.1.mlp.experts.down_proj.weight"])
