"""Test the memory ledger on real storages: a planned step has no violation; other bytes and wrong tables are found."""

from dataclasses import replace

import pytest
import torch

from verl_patches.errors import RecipeError
from verl_patches.memory.ledger import Ledger, memory_summary, process_memory_meter, violation_text
from verl_patches.memory.measure import held_bytes
from verl_patches.memory.schedule import SCHEDULE, residency


def begin_phases(scheduler, until):
    for phase in scheduler.schedule.phases:
        scheduler.begin(phase.name)
        if phase.name == until:
            return


@pytest.mark.parametrize(("phase", "group", "size", "words"), [
    ("reshard", "grads", 800, r"rank 0, entering reshard: grads .* 800 bytes, expected 0 by schedule 'ours'"),
    ("rollout", "rollout_weights", 607, "holds 607 bytes, expected 600"),
    ("rollout", "kv_cache", 0, "holds 0 bytes, expected 1,000"),
])  # fmt: skip
def test_a_group_with_other_bytes_is_named(make_scheduler, phase, group, size, words):
    scheduler, _, handlers = make_scheduler()
    begin_phases(scheduler, "update")
    begin_phases(scheduler, phase)
    handlers[group].resize(size)
    with pytest.raises(RecipeError, match=words):
        scheduler.ledger.enter(phase)
    (violation,) = scheduler.ledger.take()["violations"]
    assert (violation["phase"], violation["group"], violation["bytes"]) == (phase, group, size)


def test_a_wrong_table_fails(make_scheduler):
    """Check as a negative control that a table with a missing move fails."""
    scheduler, _, _ = make_scheduler()
    phases = tuple(replace(phase, enter=()) if phase.name == "ref" else phase for phase in SCHEDULE.phases)
    scheduler.ledger._expected = residency(replace(SCHEDULE, phases=phases))
    with pytest.raises(RecipeError, match="ref: ref_params"):
        begin_phases(scheduler, "update")


def test_report_continues_and_records_the_violation(make_scheduler):
    scheduler, _, handlers = make_scheduler(action="report", rank=3)
    begin_phases(scheduler, "rollout")
    handlers["grads"].resize(8)
    scheduler.ledger.enter("rollout")
    memory = memory_summary([{"rank": 3, **scheduler.ledger.take()}, None])
    assert memory["violations"]["count"] == 1 and memory["violations"]["first"][0]["rank"] == 3
    assert "rank 3, rollout: grads holds 8 bytes, expected 0" in violation_text(memory["violations"])
    assert violation_text({"count": 0, "first": []}) == "" and memory_summary([None, None]) is None


def test_peaks_include_temporary_memory():
    measured, held = iter([{"rss": n} for n in (5, 9, 7, 1, 2, *range(9))]), {"window": 0}
    ledger = Ledger(SCHEDULE, action="strict", device_memory=measured.__next__)
    ledger.register("swap_window", lambda: held["window"], full_bytes=0, partial_at_first=True)
    ledger.enter("update")
    for held["window"], extra in ((100, 11), (60, 52), (0, 0)):
        ledger.raise_peak(extra_bytes=extra)
    ledger.enter("reshard")
    records = ledger.take()["records"]
    assert [record["peak_bytes"] for record in records] == [112, 0] and records[0]["measured"] == {"rss": 9}
    held["window"] = 1
    with pytest.raises(RecipeError, match="swap_window .* holds 1 bytes"):
        ledger.enter("reshard")


@pytest.mark.parametrize(("options", "sizes"), [
    ({"full_bytes": 12, "partial_at_first": True}, "4 8 12 !8 !13"),  # less is accepted until it has once been full
    ({"full_bytes": 12, "partial_at_first": True}, "!13"),
    ({}, "50 !51"),  # the first measurement counts
    ({"partial_at_first": True}, "0 50 !49"),
])  # fmt: skip
def test_a_group_that_grows_or_has_no_size(options, sizes):
    held = {"now": 0}
    ledger = Ledger(SCHEDULE, unmoved_groups={"optimizer"}, action="strict")
    ledger.register("optimizer", lambda: held["now"], **options)
    for size in sizes.split():
        held["now"] = int(size.removeprefix("!"))
        if size.startswith("!"):
            with pytest.raises(RecipeError, match=f"holds {held['now']} bytes, expected"):
                ledger.enter("update")
        else:
            ledger.enter("update")


def test_a_group_that_varies_may_stay_until_the_schedule_releases_it():
    """Vary a group like the tensor cache: other bytes in each phase, none after the update; REMAX generates twice."""
    held = {"now": 0}
    ledger = Ledger(SCHEDULE, action="strict")
    ledger.register("tensor_cache", lambda: held["now"], any_size=True)
    step = "0 reshard, 0 rollout, 7 sleep, 7 reshard, 7 rollout, 9 sleep, 5 old_log_prob, 0 ref, 3 ref, 0 update"
    for entry in [*step.split(", "), "0 reshard"]:
        size, phase = entry.split()
        held["now"] = int(size)
        ledger.enter(phase)
    held["now"] = 3
    for phase in ("wake_kv", "update"):  # the step before has left these bytes
        with pytest.raises(RecipeError, match=r"tensor_cache .* holds 3 bytes, expected 0"):
            ledger.enter(phase)


def test_storages_count_once_and_only_on_the_device():
    tensor = torch.zeros(10)
    assert held_bytes([tensor, tensor[:5], [tensor[2:], (None, torch.zeros(1))]], "cpu") == 44
    assert held_bytes([tensor, torch.zeros(3, device="meta")], "meta") == 12
    tensor.untyped_storage().resize_(0)
    assert held_bytes([tensor], "cpu") == 0


def test_the_drivers_figure_is_measured_too(monkeypatch):
    """Measure it because torch's counters do not fall when vLLM's sleep mode unmaps memory outside the pool."""
    free = [60, 90]
    counters = {"memory_allocated": 30, "max_memory_allocated": 35, "memory_reserved": 40}
    counters |= {"reset_peak_memory_stats": None}
    for name, value in counters.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free.pop(0), 100))
    measure = process_memory_meter("cuda")
    assert measure() == {"allocated": 30, "peak": 35, "reserved": 40, "used": 40} and measure()["used"] == 10
    assert process_memory_meter("cpu")()["rss"] > 1e6
