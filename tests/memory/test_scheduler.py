"""Test a schedule on real storages: exactly the table's moves, in its order, each followed by the ledger."""

import pytest
import torch

from tests.memory.conftest import SIZES
from verl_patches.errors import RecipeError
from verl_patches.memory import counters
from verl_patches.memory.schedule import SCHEDULE, simulate
from verl_patches.worker.context import WorkerContext


def fail():
    raise MemoryError("no memory")


def step(scheduler):
    for phase in scheduler.schedule.phases:
        scheduler.begin(phase.name)
    scheduler.end()


def test_every_step_makes_the_moves_of_the_table_as_simulated(make_scheduler):
    scheduler, log, handlers = make_scheduler()
    step(scheduler)
    assert "offload" in counters.take_seconds() and log[0] == "load actor_params"
    log.clear()
    counters.take_moves()
    step(scheduler)
    assert [move["verb"] for move in counters.take_moves()] == ["empty_cache", "empty_cache"]
    simulated = simulate(SCHEDULE, SIZES)
    moments = simulated.values()
    assert log[0] == "alloc rollout_weights"  # the weights are on the device since the update
    loads, offloads = (sum(SIZES[w.split()[1]] for w in log if w.startswith(verb)) for verb in ("load", "offload"))
    assert loads == sum(m.to_device_bytes for m in moments) and offloads == sum(m.to_host_bytes for m in moments)
    assert log.count("empty_cache") == sum(m.empty_cache_calls for m in moments) == 2
    taken = scheduler.ledger.take()
    assert taken["violations"] == [] and [r["phase"] for r in taken["records"]] == 2 * list(simulated)
    records = {record["phase"]: record for record in taken["records"]}
    assert all(records[name]["peak_bytes"] <= moment.peak_bytes for name, moment in simulated.items())
    assert records["update"]["peak_bytes"] == 400 + 800 + 2400 + 10
    assert records["wake_kv"]["bytes"]["kv_cache"] == 1000
    assert scheduler.ledger.take() == {"records": [], "violations": []}
    handlers["optimizer"].load()
    # the contents were copied to the host and back
    assert torch.equal(handlers["optimizer"].device, torch.arange(2400).to(torch.uint8))


def test_a_phase_that_only_some_steps_have_leaves_nothing_behind(make_scheduler):
    """Run the log-prob check's pass without old log-probs; otherwise the strict ledger would stop at ref."""
    scheduler, log, _ = make_scheduler(schedule=SCHEDULE.with_rare_phase("old_log_prob"))
    for phases in ("ref update", "old_log_prob ref update", "ref update"):
        log.clear()
        for phase in "reshard wake_kv rollout sleep".split() + phases.split():
            scheduler.begin(phase)
            if phase == "old_log_prob":
                scheduler.end()  # as the actor's pass does
                assert log[-2:] == ["load actor_params", "free actor_params"]


def test_a_phase_that_failed_is_ended_before_the_next_begins(make_scheduler):
    scheduler, log, _ = make_scheduler(("actor_params", "grads", "optimizer", "rollout_weights", "reshard_buffers"))
    scheduler.begin("update")
    assert scheduler.offloaded_handlers(["optimizer", "kv_cache"]) == []
    scheduler.begin("reshard")  # the update raised; its moves at the end were not done
    assert log.index("free grads") < log.index("alloc rollout_weights") and scheduler.offloaded_handlers(["optimizer"])
    log.clear()
    scheduler.end()
    scheduler.end()
    assert log == ["free reshard_buffers", "offload actor_params"]


def test_a_group_that_stays_is_not_moved(make_scheduler):
    scheduler, log, handlers = make_scheduler(("actor_params", "ref_params", "grads"), unmoved_groups={"grads"})
    assert not scheduler.offloaded_handlers(["grads"])
    with pytest.raises(RecipeError, match="grads .* holds 0 bytes, expected 800"):
        step(scheduler)
    handlers["grads"].resize(800)
    log.clear()
    step(scheduler)
    assert {word.split()[-1] for word in log} == {"actor_params", "ref_params", "empty_cache"}


def test_a_handler_without_effect_is_found_at_the_next_phase(make_scheduler):
    """Check as a negative control that the ledger finds it."""
    scheduler, _, handlers = make_scheduler()
    handlers["ref_params"].free = lambda: None
    with pytest.raises(RecipeError, match="entering advantage: ref_params .* expected 0"):
        step(scheduler)


def test_vllms_calls_take_the_place_of_its_moves(make_scheduler):
    scheduler, log, _ = make_scheduler(tuple(group for group in SIZES if group not in ("rollout_weights", "kv_cache")))
    for phase in ("reshard", "wake_kv", "rollout", "sleep"):
        scheduler.begin(phase, lambda phase=phase: log.append(f"vLLM {phase}"))
    assert ", ".join(log) == (
        "load actor_params, vLLM reshard, alloc reshard_buffers, free reshard_buffers, offload actor_params, "
        "empty_cache, vLLM wake_kv, alloc tensor_cache, vLLM sleep, empty_cache"
    )
    scheduler.begin("update")
    scheduler.begin("reshard", lambda: None)
    with pytest.raises(MemoryError):
        scheduler.begin("wake_kv", fail)
    log.clear()
    scheduler.begin("reshard", lambda: None)  # the failed wake-up leaves nothing behind
    assert log == ["load actor_params", "alloc reshard_buffers"]


def test_a_phase_around_work_that_failed_stays_open_until_the_next_begins(make_scheduler):
    scheduler, log, _ = make_scheduler(("ref_params",))
    here = WorkerContext(scheduler=scheduler, ledger=scheduler.ledger)
    with here.phase("ref"):
        here.raise_peak(extra_bytes=50)
    assert log[-1] == "free ref_params" and scheduler.ledger.take()["records"][0]["peak_bytes"] == 450
    with pytest.raises(MemoryError), here.phase("ref"):
        fail()
    assert log[-1] == "load ref_params"
    here.begin("update")
    assert log[-1] == "free ref_params"


def test_after_an_error_groups_are_released_and_none_is_loaded(make_scheduler):
    scheduler, log, handlers = make_scheduler(("actor_params", "grads", "optimizer"))
    scheduler.begin("update")
    handlers["optimizer"].offload = fail
    log.clear()
    with pytest.raises(MemoryError, match="no memory"):
        scheduler.end()
    assert log == ["free grads"]
    scheduler, log, handlers = make_scheduler(("actor_params", "grads", "optimizer"))
    handlers["actor_params"].load = fail
    with pytest.raises(MemoryError, match="no memory"):
        scheduler.begin("update")
    assert log == []
