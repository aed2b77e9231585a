"""Test that the committed sample is its generator's output, and that its rows are right."""

import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from verl_patches.rewards.maths import last_box

DATA = Path(__file__).resolve().parents[3] / "data"
SAMPLE = DATA / "deepscaler_sample.json"


def test_the_generator_makes_the_committed_file_byte_for_byte(tmp_path):
    command = [sys.executable, "-I", str(DATA / "make_sample.py"), "--output", str(tmp_path / "again.json")]
    subprocess.run(command, check=True, capture_output=True, env={"PYTHONHASHSEED": "7"})
    assert (tmp_path / "again.json").read_bytes() == SAMPLE.read_bytes()


def test_a_wrong_answer_stops_the_generator():
    make_sample = runpy.run_path(str(DATA / "make_sample.py"))

    def wrong(rng):
        return make_sample["Item"]("What is 1 + 1?", "3", "Count.", 1 + 1 == 3)

    with pytest.raises(ValueError, match="its check contradicts the answer '3'"):
        make_sample["make_rows"]((wrong,))


def test_rows_are_distinct_and_their_answers_varied():
    rows = json.loads(SAMPLE.read_text(encoding="utf-8"))
    assert all(set(row) == {"problem", "answer", "solution"} for row in rows)
    assert len(rows) == len({row["problem"] for row in rows}) == 312
    assert all(last_box(row["solution"]) == row["answer"] for row in rows)
    answers = [row["answer"] for row in rows]
    marks = r"\frac \{ \infty [ \sqrt \pi \% . x^2 ( -".split()  # fractions, sets, intervals, roots, and others
    assert all(sum(mark in answer for answer in answers) >= 8 for mark in marks)
    assert max(Counter(answers).values()) <= 12  # no answer can be guessed
