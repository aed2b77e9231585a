"""What memory and data rooms cost a whole smoke run: wall time with all of it on against all of it off. Run by hand:

    python tests/benchmarks/smoke_wall.py [--pairs 5] [--steps 4]

on: our order with offload, ledger, tensor cache, dispatch once, start skew. off: none of it, by `recipe.patches` and
the switches of the config, and nothing is offloaded. Both have the life of rollout weights and KV cache (a CPU has no
other) and the pass for old log-probs. Pairs alternate which one goes first. Takes about ten minutes; wants a machine
that does nothing else.

Prints JSON: a list of figures with `value`, `bound` and `peer`. Exits 1 where a bound is exceeded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
ON = (
    *(f"{ACTOR}.{what}_offload=true" for what in ("param", "grad", "optimizer")),
    f"{REF}.param_offload=true",
    "recipe.memory.ledger=report",
    "recipe.tensor_cache.enabled=true",
)
OFF = ("recipe.patches=[-memory.order,-memory.empty_cache,-memory.ledger,-dispatch.*]", "recipe.memory.ledger=off")
SEED = "actor_rollout_ref.rollout.seed=1"  # with 0, a token of step 2 lies between two experts (test_tensor_cache.py)
BOUND = 0.02


def run(folder: str, name: str, steps: int, overrides: tuple[str, ...]) -> tuple[float, float]:
    """(wall seconds of the command, seconds of its steps after the first)."""
    print(f"smoke {name}", file=sys.stderr)
    start = time.monotonic()
    subprocess.run(
        [
            sys.executable,
            "-m",
            "verl_patches",
            "smoke",
            "--run",
            name,
            "--steps",
            str(steps),
            f"recipe.output_root={folder}",
            SEED,
            *overrides,
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    wall = time.monotonic() - start
    summary = json.loads((Path(folder) / name / "summary.json").read_text())
    return wall, sum(step["seconds"]["step"] for step in summary["steps"][1:])


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    asked = parser.parse_args()
    seconds: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        run(folder, "first", 1, ())  # makes the model and the data, fills the page cache
        for pair in range(asked.pairs):
            for name in ("on", "off") if pair % 2 else ("off", "on"):
                seconds[name].append(run(folder, f"{name}{pair}", asked.steps, ON if name == "on" else OFF))
    figures = []
    for at, (what, bound) in enumerate((("wall time", BOUND), ("steps after the first", None))):
        on, off = ([each[at] for each in seconds[name]] for name in ("on", "off"))
        slower = statistics.median(a / b for a, b in zip(on, off, strict=True)) - 1
        peer = {"on, s": [round(s, 2) for s in on], "off, s": [round(s, 2) for s in off]}
        figures.append(
            {
                "name": f"smoke, {what}: on / off - 1, median of pairs",
                "value": round(slower, 4),
                "bound": bound,
                "fine": bound is None or slower <= bound,
                "peer": peer,
            }
        )
    fine = all(figure["fine"] for figure in figures)
    print(json.dumps({"name": "smoke_wall", "figures": figures, "fine": fine}, indent=1))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
