"""Measure the memory and time of `data build`; run it by hand:

    python tests/benchmarks/data.py [--rows 1000000] [--workers 2]

JSON lines of about 1 KB are made in a temporary folder and built, a fifth of them first. Peak memory is the sum of the
anonymous PSS of all processes, sampled (the files of datasets are mapped: the kernel drops their pages when it needs
memory); its bound is absolute, and so is that of its growth with each row.

Prints JSON: a list of figures, each with `value` and `bound`. Exits 1 where a bound is missed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from report import ROOT, argument_parser, figure, print_report

MEMORY_BOUND_MB, ROW_BOUND_BYTES = 500, 400  # digests and numbers of rows are Python's integers


def anonymous_bytes(pid: int) -> int:
    """Return the anonymous memory of a process; pages that processes share are divided among them."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss_Anon:")) * 1024


def peak_and_seconds(folder: Path, rows: int, workers: int) -> tuple[int, float]:
    """Return peak bytes and seconds of one build."""
    source, working = folder / "rows.jsonl", "because one and one are two " * 20
    with source.open("w") as file:
        for number in range(rows):
            problem = f"Problem {number}: " + "what is one and one? " * 20
            file.write(json.dumps({"problem": problem, "answer": str(number), "solution": working}) + "\n")
    keys = {"input": str(source), "handler_name": "maths", "output_prefix": str(folder / f"out{rows}")}
    (folder / "build.yaml").write_text(json.dumps({**keys, "prompt_type": "boxed", "workers": workers}))
    command = [sys.executable, "-m", "verl_patches", "data", "build", str(folder / "build.yaml"), "--json"]
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    while process.poll() is None:
        try:
            root = psutil.Process(process.pid)
            peak = max(peak, sum(anonymous_bytes(each.pid) for each in (root, *root.children(recursive=True))))
        except (psutil.NoSuchProcess, OSError):
            pass  # the process has ended
        time.sleep(0.2)
    if process.returncode:
        raise RuntimeError(f"data build ended with code {process.returncode}")
    return peak, time.perf_counter() - start


def main() -> int:
    """Measure and print the report."""
    given = argument_parser(__doc__, rows=1_000_000, workers=2).parse_args()
    few = max(given.rows // 5, 100)
    with tempfile.TemporaryDirectory() as folder:
        small, _ = peak_and_seconds(Path(folder), few, given.workers)
        peak, seconds = peak_and_seconds(Path(folder), given.rows, given.workers)
    growth = max(peak - small, 0) / max(given.rows - few, 1)
    figures = [
        figure(f"peak memory of all processes, {given.rows} rows", round(peak / 1e6), "MB", MEMORY_BOUND_MB),
        figure("its growth with each row", round(growth), "bytes", ROW_BOUND_BYTES if given.rows >= 500_000 else None),
        figure("rate", round(given.rows / seconds), "rows/s", None),
    ]
    return print_report("data", figures, workers=given.workers, cores=len(os.sched_getaffinity(0)))


if __name__ == "__main__":
    sys.exit(main())
