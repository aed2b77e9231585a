"""What a weight sync costs, against its bounds and against the pinned verl path. Run by hand:

    python tests/benchmarks/reshard.py [--only plan] [--only execute] [--only loop]

plan: DeepSeek-V3 671B, each plan in a fresh process on one core. execute: reshard_execute.py, on gloo ranks. loop: the
smoke with the resharder and with verl's own path in turns, 5 pairs (about ten minutes).

Prints JSON: a list of figures, each with `value`, `bound` (what it must not exceed; null where it is only told) and
`peer` (another way to do the same, with its source; null where there is none). Exits 1 where a bound is exceeded.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from report import ROOT, figure, parser_of, print_report, run_python, run_smoke

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


def execute_figures() -> Iterator[dict[str, Any]]:
    """What reshard_execute.py measures; its ratio as time over the time of load_weights, so that less is better."""
    command = [sys.executable, str(Path(__file__).with_name("reshard_execute.py"))]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    decoder, rest, results = json.JSONDecoder(), done.stdout.strip(), {}
    while rest:
        result, end = decoder.raw_decode(rest)
        results[result["name"]], rest = result, rest[end:].strip()
    missing = {"reshard_pairs", "reshard_python_time"} - results.keys()
    if missing:  # its exit code is 1 if a bound is exceeded, which a figure shows as well, or if it failed
        raise RuntimeError(f"reshard_execute.py ended with code {done.returncode} without {', '.join(sorted(missing))}")
    pairs, python = results["reshard_pairs"], results["reshard_python_time"]
    unequal, tried = pairs["bound"] - pairs["value"], {"tried": pairs["bound"]}
    yield figure("random pairs not equal to slices of the HF tensors", unequal, "pairs", 0, tried, fine=pairs["fine"])
    ratio, bound = 1 / python["value"], 1 / python["bound"]
    yield figure("Python time a sync / load_weights", ratio, "", bound, python["peer"], fine=python["fine"])


def loop_figures(pairs: int = 5) -> Iterator[dict[str, Any]]:
    """Seconds of the weight sync in the smoke, median over pairs of runs of each run's median after step 1."""
    seconds: dict[str, list[float]] = {"ours": [], "verls": []}
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(pairs):
            for name, overrides in (("ours", ()), ("verls", ("recipe.patches=[-reshard.*]",))):
                summary = run_smoke(folder, f"{name}{pair}", "--steps", "4", "--rollout-tp", "2", *overrides)
                seconds[name].append(statistics.median(s["seconds"]["reshard"] for s in summary["steps"][1:]))
    ours, verls = (round(statistics.median(seconds[name]), 4) for name in ("ours", "verls"))
    peer = {"verl's own path, s": seconds["verls"], "ours, s": seconds["ours"]}
    yield figure("loop: weight sync, median of pairs", ours, "s", verls, peer)


# functions that yield figures, measured on this machine
PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "plan": plan_figures,
    "execute": execute_figures,
    "loop": loop_figures,
}


def main() -> int:
    """Measure and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; can be given again")
    parser.add_argument("--pair", help="print the plan of one of PAIRS; used by `plan` for its child processes")
    given = parser.parse_args()
    if given.pair:
        plan_alone(given.pair)
        return 0
    figures = (line for part in given.only or PARTS for line in PARTS[part]())
    return print_report("reshard", figures, python=sys.version.split()[0])


if __name__ == "__main__":
    sys.exit(main())
