"""Test the weight sync as verl's sharding manager calls it, on gloo ranks: memory that moves, errors of one rank.

tests/loop/test_reshard.py has syncs without either.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest

from tests.reshard import in_loop_job
from tests.reshard.cases import PLAIN
from verl_patches.errors import RecipeError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("side", ["rollout", "training"])
def test_memory_that_moved_on_one_rank_is_learnt_and_proven_again_on_all(ranks4, side):
    for results in ranks4.run(in_loop_job.run_syncs, PLAIN, "first", side):
        assert [(sync.message, sync.wrong) for sync in results] == [("fine", [])] * 3
        for fact in ("learnt", "verified"):
            assert [sync.report[fact] for sync in results] == [True, True, False]


@pytest.mark.parametrize(("step", "number", "todo"), [
    ("learn", 1, "training or rollout weights cannot be mapped"),
    ("learn", 2, "training or rollout weights cannot be mapped"),
    ("plan", 2, "no weight sync can be planned"),
    ("post_load", 1, "rollout weights are incomplete"),
    ("wake ['weights']", 1, "the rollout engine could not be prepared"),
    ("poison", 2, "no weights were sent"),
])  # fmt: skip
def test_an_error_of_one_rank_stops_all_alike_and_the_next_sync_is_right(ranks4, step, number, todo):
    """Move memory before the second sync: the executor of the first would write into the old one."""
    results = ranks4.run(in_loop_job.run_syncs, PLAIN, "every", "all", step, number)
    (message,) = {syncs[number - 1].message for syncs in results}
    assert f"reshard: {todo}" in message and f"rank 1: OSError: broken {step}" in message
    for syncs in results:
        spoilt = syncs.pop(number - 1)
        assert [(sync.message, sync.wrong) for sync in syncs] == [("fine", [])] * 2
        assert step == "post_load" or spoilt.wrong


@pytest.mark.parametrize("scheduled", [True, False])
def test_an_engine_that_stays_awake_is_synced_and_put_to_sleep_once(scheduled, monkeypatch):
    """Call generate_sequences three times as recipe.filter_groups; in verl's own memory order each syncs and sleeps."""
    from verl_patches.patching.row import make_subclass
    from verl_patches.worker import sharding

    seen = []
    monkeypatch.setattr(sharding, "context", lambda: SimpleNamespace(scheduler=object() if scheduled else None))
    monkeypatch.setattr(sharding, "is_on", lambda row: False)
    methods = {"__enter__": lambda self: seen.append("sync"), "__exit__": lambda self, *error: seen.append("sleep")}
    manager = make_subclass(type("Upstream", (), methods), sharding.RecipeShardingManager)()
    engine = SimpleNamespace(wake_up=lambda tags: None, sleep=lambda level: seen.append("sleep"))
    vars(manager).update(inference_engine=engine, actor_module=[])

    def generate(error=None):
        with manager:
            seen.append("generate")
            if error:
                raise error

    manager.keep_awake()
    for _ in range(3):
        generate()
    manager.end_rollout()
    manager.end_rollout()
    each = ["sync", "generate", "sleep"]
    assert seen == (["sync", *["generate"] * 3, "sleep"] if scheduled else each * 3)
    seen.clear()
    generate()  # validation, or the next step: the weights are new
    manager.keep_awake()
    with pytest.raises(OSError):
        generate(OSError())
    generate()
    assert seen == each * 3


@pytest.mark.parametrize("scheduled", [True, False])
def test_an_error_of_the_rollout_is_not_hidden_by_the_sleep_that_follows(scheduled, monkeypatch, caplog):
    from verl_patches.patching.row import make_subclass
    from verl_patches.worker import sharding

    def fails(self, *error, **level):
        raise RecipeError("sleep() with 8 unfinished requests")

    monkeypatch.setattr(sharding, "context", lambda: SimpleNamespace(scheduler=object() if scheduled else None))
    upstream = type("Upstream", (), {"__enter__": lambda self: None, "__exit__": fails})
    manager = make_subclass(upstream, sharding.RecipeShardingManager)()
    engine = SimpleNamespace(wake_up=lambda tags: None, sleep=functools.partial(fails, None))
    vars(manager).update(inference_engine=engine, actor_module=[])
    monkeypatch.setattr(sharding, "is_on", lambda row: False)
    with pytest.raises(OSError, match="device"), manager:
        raise OSError("device")
    assert "8 unfinished requests" in caplog.text
    with pytest.raises(RecipeError), manager:  # negative control: the sleep's error alone
        pass
