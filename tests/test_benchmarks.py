"""Benchmarks that docs quote start and report in a form that takes seconds; their bounds are read by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parent / "benchmarks"
SMALL = (
    "offload.py",
    "planning.py",
    "rebalance.py",
    "reshard.py --only plan",
    "heartbeat.py",
    "prelude_import.py --runs 1",
)


@pytest.mark.slow
@pytest.mark.parametrize("words", SMALL)
def test_a_benchmark_starts_and_reports(words):
    command = [sys.executable, *words.split()]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: a bound was missed, also on a busy machine
    report = json.loads(done.stdout)
    assert report.get("figures") or "value" in report, report
