"""Seconds of one core that plans for 256 dies take: `python tests/benchmarks/planning.py`, by hand; prints JSON.

Each figure is measured in a process of its own, after imports.
"""

from __future__ import annotations

import os
import sys
import time

from report import ROOT, figure, print_report, run_python

BIG = "deepseekv3_256die_random_init"
BOUNDS = {  # seconds
    "rollout shards, all experts on each rank": 1.0,
    "training shards": 0.2,
    "plan of 256 dies": 10.0,
    "micro batches of a step": 1.0,
    "search of layouts for 256 dies": 10.0,
}


def measure(name: str) -> float:
    """CPU seconds of one measurement on one core."""
    from tests.runs import composed
    from tests.step.batches.lengths import lognormal_lengths
    from verl_patches.catalog import ROWS
    from verl_patches.layout.inventory import build_inventory
    from verl_patches.layout.parallel import ParallelLayout, parse_layout
    from verl_patches.layout.sharding import local_parameters
    from verl_patches.plan.plan import build_plan
    from verl_patches.plan.search import search
    from verl_patches.plan.step_plan import Workload
    from verl_patches.rules import RULES
    from verl_patches.step.batches.batch_plan import plan_batch, train_replicas

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    run, inventory = composed(BIG), build_inventory(ROOT / "configs" / "model" / "deepseekv3_671b.json")
    train = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")
    rollout, lengths = ParallelLayout(8, tp=8, etp=8), lognormal_lengths(512 * 16, 0.7, seed=1)
    work = {
        "rollout shards, all experts on each rank": lambda: local_parameters(inventory, rollout, 0, "vllm"),
        "training shards": lambda: local_parameters(inventory, train, 0, "mindspeed"),
        "plan of 256 dies": lambda: build_plan(run, RULES.checks(run), BIG, [], ROWS),
        "micro batches of a step": lambda: plan_batch(
            train_replicas(train), lengths, mini_batch_size=len(lengths), micro_batch_size=1
        ).sends(0),
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
