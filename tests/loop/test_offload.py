"""Offload in the real loop, all of it, on both lines: same updates, one copy a byte, no host memory after step 1."""

import pytest
from loop_runs import OFFLOAD

from verl_patches.memory.schedule import SCHEDULE, simulate

pytestmark = pytest.mark.slow
STRICT = ("--steps", "2", "recipe.memory.ledger=strict")


def grad_norms(run):
    assert run.summary["exit"] == "ok" and all(s["memory"]["violations"]["count"] == 0 for s in run.steps)
    return [step["grad_norm"] for step in run.steps]


def assert_one_copy_and_no_new_host_memory(run, line):
    first, second = (step["offload"] for step in run.steps)
    assert first["copies_per_byte"] == second["copies_per_byte"] == 1
    assert first["host_bytes"] > 0 and second["host_allocations"] == second["host_bytes"] == 0
    moves = second["moves"]
    assert moves["free grads"]["copied_bytes"] == moves["free ref_params"]["copied_bytes"] == 0
    assert "offload ref_params" not in moves and "free actor_params" not in moves  # they stay after old_log_prob
    assert moves["load optimizer"] == moves["offload optimizer"]
    sizes = run.steps[1]["memory"]["phases"]["update"]["bytes"]
    sizes = {**sizes, "ref_params": run.steps[1]["memory"]["phases"]["ref"]["bytes"]["ref_params"]}
    moments = simulate(SCHEDULE, sizes).values()
    for way in ("to_device_bytes", "to_host_bytes"):  # ranks' shares of the optimizer differ by a few hundred bytes
        assert second[way]["max"] / sum(getattr(moment, way) for moment in moments) == pytest.approx(1, abs=1e-3)


def test_everything_offloaded_changes_no_update(line, start):
    """Row memory.order."""
    run = start(*STRICT, *OFFLOAD)
    assert grad_norms(run) == grad_norms(start())[:2]
    assert_one_copy_and_no_new_host_memory(run, line)


def test_without_offload_nothing_is_moved(smoke):
    """Negative control."""
    assert [step["offload"] for step in smoke().steps] == [None, None, None]


def test_a_swapped_optimizer_changes_no_update(smoke):
    """Row memory.swap_optimizer; one piece on the device at a time."""
    run = smoke(*STRICT, "recipe.train.swap_optimizer=true", "recipe.train.swap_optimizer_times=8")
    assert grad_norms(run) == grad_norms(smoke())[:2]
    first, second = (step["offload"] for step in run.steps)
    assert second["host_bytes"] == 0 < first["host_bytes"] and second["copies_per_byte"] == 1
    whole = second["moves"]["load optimizer"]["bytes"]
    assert second["moves"]["offload optimizer"]["bytes"] == whole and 0 < second["swap_peak_bytes"] <= whole / 4
