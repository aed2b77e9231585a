"""What memory and data features cost a whole smoke run: wall time with all of them on against all off. Run by hand:

    python tests/benchmarks/smoke_wall.py [--pairs 5] [--steps 4]

on: our order with offload, ledger, tensor cache, dispatch once, start skew. off: none of it, by `recipe.patches` and
the switches of the config, and nothing is offloaded. Both have sleep mode (a CPU has no other) and the pass for old
log-probs. Pairs alternate which one goes first. Takes about ten minutes; wants a machine that does nothing else.

Prints JSON: a list of figures with `value`, `bound` and `peer`. Exits 1 where a bound is exceeded.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time

from report import figure, parser_of, print_report, run_smoke

ACTOR, REF = "actor_rollout_ref.actor.megatron", "actor_rollout_ref.ref.megatron"
SWITCHES = {
    "on": (
        *(f"{ACTOR}.{group}_offload=true" for group in ("param", "grad", "optimizer")),
        f"{REF}.param_offload=true",
        "recipe.memory.ledger=report",
        "recipe.tensor_cache.enabled=true",
    ),
    "off": (
        "recipe.patches=[-memory.order,-memory.empty_cache,-memory.ledger,-dispatch.*]",
        "recipe.memory.ledger=off",
    ),
}
SEED = "actor_rollout_ref.rollout.seed=1"  # with 0, a token of step 2 lies between two experts (test_tensor_cache.py)
BOUND = 0.02


def run(folder: str, name: str, steps: int, overrides: tuple[str, ...]) -> tuple[float, float]:
    """(wall seconds of the command, seconds of its steps after the first)."""
    start = time.monotonic()
    summary = run_smoke(folder, name, "--steps", str(steps), SEED, *overrides)
    return time.monotonic() - start, sum(step["seconds"]["step"] for step in summary["steps"][1:])


def main() -> int:
    """Measure and print."""
    given = parser_of(__doc__, pairs=5, steps=4).parse_args()
    seconds: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        run(folder, "first", 1, ())  # makes the model and the data, fills the page cache
        for pair in range(given.pairs):
            for name in ("on", "off") if pair % 2 else ("off", "on"):
                seconds[name].append(run(folder, f"{name}{pair}", given.steps, SWITCHES[name]))
    figures = []
    for at, (part, bound) in enumerate((("wall time", BOUND), ("steps after the first", None))):
        on, off = ([pair[at] for pair in seconds[name]] for name in ("on", "off"))
        slower = statistics.median(a / b for a, b in zip(on, off, strict=True)) - 1
        peer = {"on, s": [round(s, 2) for s in on], "off, s": [round(s, 2) for s in off]}
        fine = bound is None or slower <= bound
        name = f"smoke, {part}: on / off - 1, median of pairs"
        figures.append(figure(name, round(slower, 4), "", bound, peer, fine=fine))
        figures[-1].pop("unit")
    return print_report("smoke_wall", figures)


if __name__ == "__main__":
    sys.exit(main())
