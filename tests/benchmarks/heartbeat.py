"""Measure the CPU time of a worker's heartbeat with as many process groups as in the 256-die layout. Run by hand:

    python tests/benchmarks/heartbeat.py [--groups 25] [--step 300]

Prints JSON: `value`, the share of a step of --step seconds that two gloo ranks spend on heartbeats, in CPU seconds, and
as its peers the microseconds of a beat (one a second), of the begin of a phase (20 a step) and of a call (10 a step).
Exits 1 above the bound.
"""

from __future__ import annotations

import sys
import tempfile

from report import argument_parser, figure, print_report

from tests.ranks import Ranks

BOUND = 0.001
PHASES, CALLS = 20, 10


def main() -> int:
    """Measure and print the report."""
    from verl_patches.heartbeat.heartbeat import BEAT_S

    given = argument_parser(__doc__, groups=25, step=300).parse_args()
    with tempfile.TemporaryDirectory() as folder, Ranks(2) as ranks:
        costs = ranks.run("tests.heartbeat.heartbeat_job:measure", given.groups, folder)[0]
    spent = given.step / BEAT_S * costs["beat"] + PHASES * costs["phase"] + CALLS * costs["call"]
    peer = {f"{name} us": round(1e6 * seconds, 1) for name, seconds in costs.items()}
    return print_report("heartbeat", [figure("share of a step", round(spent / given.step, 6), "", BOUND, peer)])


if __name__ == "__main__":
    sys.exit(main())
