"""How long a process waits for the prelude, measured in fresh processes. Run by hand:

    python tests/benchmarks/prelude_import.py [--runs 15]

Prints JSON: `value`, the median milliseconds that `from verl_patches import prelude_patch` takes inside the process,
and as its peer `interpreter`, the median milliseconds of a whole process that does nothing. Exits 1 above the bound.
Bytecode is there already, as it is after the first start of a run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time

from report import figure, parser_of, run_python

BOUND_MS = 50.0
IMPORT = (
    "import time; start = time.perf_counter(); from verl_patches import prelude_patch; "
    "print((time.perf_counter() - start) * 1000)"
)


def run(code: str) -> tuple[float, str]:
    """(milliseconds of the whole process, its stdout)."""
    start = time.perf_counter()
    output = run_python("-c", code, VERL_PATCHES="line=pypi,platform=cpu")
    return (time.perf_counter() - start) * 1000, output


def main() -> int:
    """Measure and print."""
    runs = parser_of(__doc__, runs=15).parse_args().runs
    run(IMPORT)  # compiles, if need be
    peer = {"interpreter": round(statistics.median(run("pass")[0] for _ in range(runs)), 1)}
    imports = [float(run(IMPORT)[1]) for _ in range(runs)]
    value = statistics.median(imports)
    ends = {"min": round(min(imports), 1), "max": round(max(imports), 1), "runs": runs}
    line = figure("prelude_import", round(value, 1), "ms", BOUND_MS, peer, **ends, fine=value <= BOUND_MS)
    print(json.dumps({**line, "python": sys.version.split()[0]}, indent=1))
    return 0 if line["fine"] else 1


if __name__ == "__main__":
    sys.exit(main())
