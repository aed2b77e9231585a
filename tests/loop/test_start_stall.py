"""A start that hangs before the workers have a model: the watch ends the run, and says which rank has not started."""

import re

import psutil
import pytest
from loop_runs import hook

pytestmark = pytest.mark.nightly
BOUND_S = 300  # a start with all its imports takes less on a busy machine


def test_a_rank_that_hangs_in_its_constructor_is_named_and_nothing_is_left(smoke):
    """Rank 0 waits for it in init_process_group, or before."""
    bounds = f"recipe.watch.first_s={BOUND_S}", f"recipe.timeouts.quiet_s={2 * BOUND_S}"  # a rank that hangs is silent
    run = smoke("--steps", "1", hook("hangs_in_constructor"), *bounds, ok=False)
    reason = run.summary["exit"]
    found = re.search(
        rf"StallError: .* is in the start for (\d+) s, where at most {BOUND_S} s were expected; (.*)", reason
    )
    assert run.code == 1 and found and BOUND_S <= int(found[1]), reason
    inside = re.search(r"rank 1 \(pid (\d+) on", found[2])
    assert inside and "in the worker's constructor" in found[2] and not psutil.pid_exists(int(inside[1])), reason
    assert f"watch: bounds of a phase: {BOUND_S} s for a first time, then 900 s" in run.log
    assert "loop_hooks.py" in (run.folder / "stacks" / "rank_1.txt").read_text()
