"""Measure the seconds of one core that plans for 256 dies take: `python tests/benchmarks/planning.py`, by hand.

Each figure is measured in a process of its own, after imports. Prints JSON.
"""

from __future__ import annotations

import os
import sys
import time

from report import figure, print_report, run_python

BIG = "deepseekv3_256die_random_init"
BOUNDS = {  # seconds
    "plan of 256 dies": 10.0,
    "search of layouts for 256 dies": 10.0,
}


def measure(name: str) -> float:
    """Return the CPU seconds of one measurement on one core."""
    from tests.runs import composed
    from verl_patches.catalog import ROWS
    from verl_patches.plan.plan import build_plan
    from verl_patches.plan.search import search
    from verl_patches.plan.step_plan import Workload
    from verl_patches.rules import RULES

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    run = composed(BIG)
    work = {
        "plan of 256 dies": lambda: build_plan(run, RULES.checks(run), BIG, [], ROWS),
        "search of layouts for 256 dies": lambda: search(run, RULES.sizes, 256, Workload(), top=4),
    }[name]
    start = time.process_time()
    work()
    return time.process_time() - start


if __name__ == "__main__":
    if sys.argv[1:]:
        print(measure(sys.argv[1]))
    else:
        seconds = {name: round(float(run_python(__file__, name)), 3) for name in BOUNDS}
        lines = [figure(name, seconds[name], "s", bound) for name, bound in BOUNDS.items()]
        sys.exit(print_report("planning, one core", lines))
