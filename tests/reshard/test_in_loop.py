"""The resharder as verl's sharding manager calls it, on gloo ranks: learning, proof, and errors of one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.reshard import in_loop_job
from tests.reshard.cases import TINY, Case
from tests.reshard.in_loop_job import FIRST
from verl_patches.layout.parallel import parse_layout, rollout_layout

# 72 words: rank 1 and 3 of the rollout hold 8 and padding
CASE = Case(TINY, parse_layout("tp2 pp2 ep2 etp1 @4 layers=1,2"), rollout_layout(1, dp=2, tp=2), bucket_bytes=1 << 13)
A3, PYPI = SimpleNamespace(line="a3"), SimpleNamespace(line="pypi")
FLAGS = 4  # collectives of one number: engine ready, memory as learnt, before and after the exchange


def test_syncs_are_right_and_learn_once(ranks4):
    plan = CASE.plan()
    for rank, (first, second) in enumerate(ranks4.run(in_loop_job.syncs, CASE, "first", 2)):
        for said, wrong, facts, _ in (first, second):
            assert (said, wrong) == ("fine", [])
            assert facts["received_bytes"] == plan.lower_bound_bytes[rank]
            assert facts["collectives"] == plan.bucket_count + FLAGS
        assert (first[2]["learnt"], first[2]["verified"]) == (True, True)
        assert (second[2]["learnt"], second[2]["verified"]) == (False, False)
        assert first[3] and not second[3]  # load_weights is asked while learning and proving only


@pytest.mark.parametrize(
    ("verify", "when"), [("off", [False] * 3), ("first", [True, False, False]), ("every", [True] * 3)]
)
def test_when_it_is_verified(ranks4, verify, when):
    for found in ranks4.run(in_loop_job.syncs, CASE, verify, 3):
        assert [facts["verified"] for _, _, facts, _ in found] == when
        assert all((said, wrong) == ("fine", []) for said, wrong, *_ in found)


def test_what_one_rank_cannot_map_goes_whole_to_all_that_need_it(ranks4):
    for found in ranks4.run(in_loop_job.syncs, CASE, "every", 3, 2):
        for said, wrong, *_ in found:
            assert (said, wrong) == ("fine", [])
        assert [loaded for *_, loaded in found[1:]] == [[FIRST], [FIRST]]


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_memory_that_moved_on_one_rank_is_learnt_and_proven_again_on_all(ranks4, side):
    for found in ranks4.run(in_loop_job.moved, CASE, side):
        assert [(said, wrong) for said, wrong, _ in found] == [("fine", [])] * 3
        assert [facts["learnt"] for *_, facts in found] == [True, True, False]
        assert [facts["verified"] for *_, facts in found] == [True, True, False]


@pytest.mark.parametrize(("what", "at", "todo"), [
    ("learn", 1, "training or rollout weights cannot be mapped"),
    ("learn", 2, "training or rollout weights cannot be mapped"),
    ("plan", 2, "rollout weights are not laid out as planned"),
    ("post_load", 1, "rollout weights are incomplete"),
    ("wake_up", 1, "the rollout engine is not ready"),
    ("poison", 2, "nothing was sent"),
])  # fmt: skip
def test_an_error_of_one_rank_stops_all_alike_and_the_next_sync_is_right(ranks4, what, at, todo):
    """At the second sync memory has moved: what was compiled for the first would write into the old one."""
    results = ranks4.run(in_loop_job.broken, CASE, what, at)
    assert len({found[at - 1][0] for found in results}) == 1
    assert f"reshard: {todo}" in results[0][at - 1][0] and f"rank 1: OSError: broken {what}" in results[0][at - 1][0]
    for found in results:
        others = [outcome for number, outcome in enumerate(found, 1) if number != at]
        assert others == [("fine", [])] * 2
    assert what == "post_load" or any(found[at - 1][1] for found in results)  # nothing was there to find otherwise


def test_the_cache_is_woken_last_and_after_training_weights_have_left(ranks4):
    events = ["wake ['weights']", "loaders", "learn", "plan", "poison", "post_load", "wake ['kv_cache']"]
    assert ranks4.run(in_loop_job.with_cache, CASE) == [events] * 4


@pytest.mark.parametrize(("given", "scheduled", "calls"), [
    ({"settings": None}, False, ["verl's"]),  # at 0.4.0 verl's worker wakes the cache, at 54c9b736 its `__enter__`
    ({"settings": None}, True, ["verl's", "kv_cache"]),
    ({"settings": A3, "sync_enabled": False, "synced_once": True}, False, ["weights", "kv_cache"]),
    ({"settings": PYPI, "sync_enabled": False, "synced_once": True}, False, ["weights"]),
    ({"settings": PYPI, "sync_enabled": False}, True, ["verl's", "kv_cache"]),  # the first sync is made all the same
])  # fmt: skip
def test_verls_path_and_a_sync_that_is_left_out(given, scheduled, calls, monkeypatch):
    """Row reshard.direct is off; `scheduled`: row memory.order is on."""
    from verl_patches.patching.row import subclass_of
    from verl_patches.worker import sharding

    seen = []
    monkeypatch.setattr(sharding, "context", lambda: SimpleNamespace(scheduler=object() if scheduled else None))
    monkeypatch.setattr(sharding, "is_on", lambda row: False)
    upstream = type("Upstream", (), {"__enter__": lambda self: seen.append("verl's")})
    manager = subclass_of(upstream, sharding.RecipeShardingManager)()
    vars(manager).update(given, inference_engine=SimpleNamespace(wake_up=lambda tags: seen.extend(tags)))
    manager.__enter__()
    assert seen == calls and manager.synced_once
