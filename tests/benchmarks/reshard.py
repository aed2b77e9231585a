"""What the plan of a weight sync of DeepSeek-V3 671B costs, against its bounds: each plan in a fresh process, one core.

    python tests/benchmarks/reshard.py

Prints JSON: a list of figures, each with `value`, `bound` (what it must not exceed; null where it is reported only) and
`peer` (another way to do the same, with its source; null where there is none). Exits 1 where a bound is exceeded.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from typing import Any

from report import ROOT, figure, parser_of, print_report, run_python

MODEL = ROOT / "configs" / "model" / "deepseekv3_671b.json"
LAYERS = "layers=7,7,8,8,8,8,8,7"
PAIRS = {  # training, rollout
    "EP256": (f"tp4 pp8 ep32 etp1 @256 {LAYERS}", "tp2 ep256 etp1 @256"),
    "2 x EP128": (f"tp4 pp8 ep32 etp1 @256 {LAYERS}", "tp2 ep128 etp1 @256"),
    "3 x EP128": (f"tp4 pp8 ep16 etp1 @384 {LAYERS}", "tp2 ep128 etp1 @384"),
}
# the public recipe's sync at EP256, counted for a rank of this layout: every expert shard is broadcast along PP first
PUBLIC_BYTES, PUBLIC_COLLECTIVES = 73.9e9, 3100


def plan_figures() -> Iterator[dict[str, Any]]:
    """Bytes, balance, collectives, memory and planning time of each pair of layouts."""
    for pair in PAIRS:
        plan = json.loads(run_python(__file__, "--pair", pair))
        must_arrive, calls = plan["must_arrive_bytes"]["mean"], {"fewest of this size": plan["collectives_bound"]}
        ratio = None
        if pair == "EP256":
            ratio = {"public recipe": round(PUBLIC_BYTES / must_arrive, 2)}
            calls = {"public recipe": PUBLIC_COLLECTIVES, **calls}
        worst = max(stage["imbalance"] for stage in plan["stages"])
        relayed = {"lower bound without relaying": plan["imbalance_bound"]}
        extra = plan["peak_extra_bytes"] / plan["bucket_bytes"]
        for name, *numbers in (
            ("bytes received / lower bound, worst rank", plan["received_over_bound"], "", 1.05, ratio),
            ("bytes that must arrive, mean rank", must_arrive, "bytes", None),
            ("bytes sent, max / mean, worst stage", worst, "", 1.10),
            ("bytes sent, max / mean, all ranks", plan["imbalance"], "", None, relayed),
            ("collectives", plan["collectives"], "", 150, calls),
            ("peak extra memory / bucket_bytes", extra, "", 4.0),
            ("planning, one core", plan["planning_s"], "s", 10.0),
            ("planning, peak memory of the process", plan["peak_rss_bytes"], "bytes", 1e9),
        ):
            yield figure(f"{pair}: {name}", *numbers)


def plan_alone(pair: str) -> None:
    """In a process of its own, on one core: from the model's config to a rank's own share of the plan."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from verl_patches.layout.inventory import build_inventory
    from verl_patches.layout.parallel import parse_layout
    from verl_patches.reshard.check import figures
    from verl_patches.reshard.plan import plan_reshard

    start = time.process_time()
    libraries = {"train_library": "mindspeed", "rollout_library": "vllm-ascend"}
    plan = plan_reshard(build_inventory(MODEL), *map(parse_layout, PAIRS[pair]), **libraries)
    plan.for_rank(0)
    plan.digest()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**figures(plan), "planning_s": round(seconds, 2), "peak_rss_bytes": peak}))


def main() -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--pair", help="print the plan of one of PAIRS; used for the child processes")
    given = parser.parse_args()
    if given.pair:
        plan_alone(given.pair)
        return 0
    return print_report("reshard", plan_figures(), python=sys.version.split()[0])


if __name__ == "__main__":
    sys.exit(main())
