"""Measure the milliseconds of a comparison of two answers in the helper process: `python tests/benchmarks/answers.py`.

Run it by hand. It compares the pairs of tests/rewards/equal_pairs.txt, each once and then all again (a gold answer is
parsed once per group of responses), and prints JSON.
"""

from __future__ import annotations

import re
import statistics
import sys
import time

from report import ROOT, figure, print_report

from verl_patches.rewards.maths import compute_score

PAIRS = (ROOT / "tests" / "rewards" / "equal_pairs.txt").read_text().splitlines()[1:]


def milliseconds(gold: str, answer: str) -> float:
    """Return the wall-clock milliseconds of one reward."""
    start = time.perf_counter()
    compute_score("benchmark", rf"\boxed{{{answer}}}", gold, cpu_limit_s=60.0)
    return 1e3 * (time.perf_counter() - start)


def main() -> int:
    pairs = [re.split("   [!=]=   ", line) for line in PAIRS]
    started = milliseconds("1/2", "0.5")
    first, again = ([milliseconds(*pair) for pair in pairs] for _ in range(2))
    figures = [figure("start of the helper and one comparison", round(started), "ms", None)]
    for name, times in (("a new pair", first), ("a pair whose answers are parsed", again)):
        for statistic in (statistics.median, statistics.mean, max):
            figures.append(figure(f"{name}, {statistic.__name__}", round(statistic(times), 1), "ms", None))
    return print_report("answers", figures, pairs=len(pairs))


if __name__ == "__main__":
    sys.exit(main())
