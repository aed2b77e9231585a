"""What a weight sync costs, against its bounds and against the pinned verl path. Run by hand:

    python tests/benchmarks/reshard.py [--only plan] [--only execute] [--only loop]

plan: DeepSeek-V3 671B, each plan in a fresh process on one core. execute: reshard_execute.py, on gloo ranks. loop: the
smoke with the resharder and with verl's own path in turns, 5 pairs (about ten minutes).

Prints JSON: a list of figures, each with `value`, `bound` (what it must not exceed; null where it is only told) and
`peer` (another way to do the same, with its source; null where there is none). Exits 1 where a bound is exceeded.
"""

from __future__ import annotations

import argparse
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

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "configs" / "model" / "deepseekv3_671b.json"
LAYERS = "layers=7,7,8,8,8,8,8,7"
PAIRS = {  # training, rollout
    "EP256": (f"tp4 pp8 ep32 etp1 @256 {LAYERS}", "tp2 ep256 etp1 @256"),
    "2 x EP128": (f"tp4 pp8 ep32 etp1 @256 {LAYERS}", "tp2 ep128 etp1 @256"),
    "3 x EP128": (f"tp4 pp8 ep16 etp1 @384 {LAYERS}", "tp2 ep128 etp1 @384"),
}
# the public recipe's sync at EP256, counted for a rank of this layout: every expert shard is broadcast along PP first
PUBLIC_BYTES, PUBLIC_COLLECTIVES = 73.9e9, 3100


def figure(name: str, value: float, unit: str, bound: float | None, peer: Any = None) -> dict[str, Any]:
    """One line of the answer."""
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "bound": bound,
        "peer": peer,
        "fine": bound is None or value <= bound,
    }


def plan_figures() -> Iterator[dict[str, Any]]:
    """Bytes, balance, collectives, memory and planning time of each pair of layouts."""
    for pair in PAIRS:
        code = f"import runpy; runpy.run_path({str(Path(__file__))!r})['plan_alone']({pair!r})"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        told = json.loads(done.stdout)
        must_arrive, fewest = told["must_arrive_bytes"]["mean"], {"fewest of this size": told["collectives_bound"]}
        ratio = {"public recipe": round(PUBLIC_BYTES / must_arrive, 2)} if pair == "EP256" else None
        calls = {"public recipe": PUBLIC_COLLECTIVES, **fewest} if pair == "EP256" else fewest
        worst = max(stage["imbalance"] for stage in told["stages"])
        yield figure(f"{pair}: bytes received / lower bound, worst rank", told["received_over_bound"], "", 1.05, ratio)
        yield figure(f"{pair}: bytes that must arrive, mean rank", must_arrive, "bytes", None)
        yield figure(f"{pair}: bytes sent, max / mean, worst stage", worst, "", 1.10)
        yield figure(
            f"{pair}: bytes sent, max / mean, all ranks",
            told["imbalance"],
            "",
            None,
            {"lower bound without relaying": told["imbalance_bound"]},
        )
        yield figure(f"{pair}: collectives", told["collectives"], "", 150, calls)
        yield figure(
            f"{pair}: peak extra memory / bucket_bytes", told["peak_extra_bytes"] / told["bucket_bytes"], "", 4.0
        )
        yield figure(f"{pair}: planning, one core", told["planning_s"], "s", 10.0)
        yield figure(f"{pair}: planning, peak memory of the process", told["peak_rss_bytes"], "bytes", 1e9)


def plan_alone(pair: str) -> None:
    """In a process of its own, on one core: from the model's config to a rank's own share of the plan."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    from verl_patches.layout.inventory import build_inventory
    from verl_patches.layout.parallel import parse_layout
    from verl_patches.reshard.check import figures
    from verl_patches.reshard.plan import plan_reshard

    start = time.process_time()
    train, rollout = map(parse_layout, PAIRS[pair])
    plan = plan_reshard(
        build_inventory(MODEL), train, rollout, train_library="mindspeed", rollout_library="vllm-ascend"
    )
    plan.for_rank(0)
    plan.digest()
    seconds = time.process_time() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**figures(plan), "planning_s": round(seconds, 2), "peak_rss_bytes": peak}))


def execute_figures() -> Iterator[dict[str, Any]]:
    """What reshard_execute.py measures; its ratio as time over the time of load_weights, so that less is better."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("reshard_execute.py"))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    decoder, rest, told = json.JSONDecoder(), done.stdout.strip(), {}
    while rest:
        one, end = decoder.raw_decode(rest)
        told[one["name"]], rest = one, rest[end:].strip()
    missing = {"reshard_pairs", "reshard_python_time"} - told.keys()
    if missing:  # its exit code says that a bound is exceeded, which a figure says as well, or that it broke down
        raise RuntimeError(f"reshard_execute.py ended with code {done.returncode} without {', '.join(sorted(missing))}")
    pairs, python = told["reshard_pairs"], told["reshard_python_time"]
    yield figure(
        "random pairs not equal to slices of the HF tensors",
        pairs["bound"] - pairs["value"],
        "pairs",
        0,
        {"tried": pairs["bound"]},
    ) | {"fine": pairs["fine"]}
    yield figure("Python time a sync / load_weights", 1 / python["value"], "", 1 / python["bound"], python["peer"]) | {
        "fine": python["fine"]
    }


def loop_figures(pairs: int = 5, steps: int = 4) -> Iterator[dict[str, Any]]:
    """Seconds of the weight sync in the smoke, median over pairs of runs of each run's median after step 1."""
    with tempfile.TemporaryDirectory() as folder:
        ours, verls = zip(
            *(
                (
                    _sync_seconds(folder, f"ours{i}", steps),
                    _sync_seconds(folder, f"verls{i}", steps, "recipe.patches=[-reshard.*]"),
                )
                for i in range(pairs)
            ),
            strict=True,
        )
    yield figure(
        "loop: weight sync, median of pairs",
        round(statistics.median(ours), 4),
        "s",
        round(statistics.median(verls), 4),
        {"verl's own path, s": list(verls), "ours, s": list(ours)},
    )


def _sync_seconds(folder: str, run: str, steps: int, *overrides: str) -> float:
    print(f"smoke {run}", file=sys.stderr)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "verl_patches",
            "smoke",
            "--run",
            run,
            "--steps",
            str(steps),
            "--rollout-tp",
            "2",
            f"recipe.output_root={folder}",
            *overrides,
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    summary = json.loads((Path(folder) / run / "summary.json").read_text())
    return statistics.median(step["seconds"]["reshard"] for step in summary["steps"][1:])


# functions that yield figures, measured on this machine
PARTS: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "plan": plan_figures,
    "execute": execute_figures,
    "loop": loop_figures,
}


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; can be given again")
    chosen = parser.parse_args().only or PARTS
    found = [line for part in chosen for line in PARTS[part]()]
    print(
        json.dumps(
            {
                "name": "reshard",
                "figures": found,
                "fine": all(line["fine"] for line in found),
                "python": sys.version.split()[0],
            },
            indent=1,
        )
    )
    return 0 if all(line["fine"] for line in found) else 1


if __name__ == "__main__":
    sys.exit(main())
