"""Test that benchmarks quoted by docs start and report in their smallest form; their bounds are read by hand."""

import json
import re
import subprocess
import sys

import pytest

from tests.conftest import ROOT

FOLDER, NIGHTLY = ROOT / "tests" / "benchmarks", pytest.mark.nightly
# arguments of a small run of each benchmark; the nightly ones start Ray, engines or a smoke run
SMALL_RUNS = (
    "start.py",
    "weights.py --only convert --pairs 1 --tiny",
    "weights.py --only save --mib 16",
    pytest.param("routing_replay.py --steps 1", marks=NIGHTLY),
)


@pytest.mark.slow
@pytest.mark.parametrize("words", SMALL_RUNS)
def test_a_benchmark_starts_and_reports(words):
    command = [sys.executable, *words.split()]
    done = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr[-2000:]  # 1: a bound was missed, which a busy machine causes too
    report = json.loads(done.stdout)
    assert report.get("figures") or report.get("worker")


def test_each_benchmark_is_quoted_by_the_docs_and_runs_here():
    texts = [path.read_text() for path in (ROOT / "docs").rglob("*.md")]
    quoted = {name for text in texts for name in re.findall(r"tests/benchmarks/(\w+\.py)", text)}
    there = {path.name for path in FOLDER.glob("*.py")} - {"report.py"}
    run = {(words if isinstance(words, str) else words.values[0]).split()[0] for words in SMALL_RUNS}
    assert quoted == there == run
