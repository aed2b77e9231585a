"""How long a process waits for the prelude, measured in fresh processes. Run by hand:

    python tests/benchmarks/prelude_import.py [--runs 15]

Prints JSON: `value`, the median milliseconds that `from verl_patches import prelude_patch` takes inside the process,
and as its peer `interpreter`, the median milliseconds of a whole process that does nothing. Exits 1 above the bound.
Bytecode is there already, as it is after the first start of a run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

BOUND_MS = 50.0
ROOT = Path(__file__).resolve().parents[2]
IMPORT = (
    "import time; start = time.perf_counter(); from verl_patches import prelude_patch; "
    "print((time.perf_counter() - start) * 1000)"
)


def run(code: str) -> tuple[float, str]:
    """(milliseconds of the whole process, what it printed)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VERL_PATCHES": "line=pypi,platform=cpu"}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return (time.perf_counter() - start) * 1000, done.stdout


def main() -> int:
    """Measure, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=15, help="processes of each kind")
    runs = parser.parse_args().runs
    run(IMPORT)  # compiles, if need be
    bare = [run("pass")[0] for _ in range(runs)]
    imports = [float(run(IMPORT)[1]) for _ in range(runs)]
    value = statistics.median(imports)
    print(
        json.dumps(
            {
                "name": "prelude_import",
                "unit": "ms",
                "value": round(value, 1),
                "bound": BOUND_MS,
                "fine": value <= BOUND_MS,
                "min": round(min(imports), 1),
                "max": round(max(imports), 1),
                "runs": runs,
                "peer": {"interpreter": round(statistics.median(bare), 1)},
                "python": sys.version.split()[0],
            },
            indent=1,
        )
    )
    return 0 if value <= BOUND_MS else 1


if __name__ == "__main__":
    sys.exit(main())
