"""Test reward functions of Python files: what verl's contract takes, and what is refused with file and line."""

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from pyarrow import parquet

from verl_patches.rewards.functions import ResultError, read_result, score_response
from verl_patches.tools.data.build import build_data
from verl_patches.tools.data.settings import read_settings

ROOT = Path(__file__).resolve().parents[2]
KEYWORDS = {"data_source": "d", "solution_str": "x", "ground_truth": "1", "extra_info": None}


@dataclasses.dataclass
class Score:
    score: float
    acc: bool


@pytest.mark.parametrize(
    ("result", "values"),
    [
        (1, {}),
        (0.5, {}),
        (True, {}),
        (np.float32(0.5), {}),
        (np.bool_(True), {}),
        (np.array(2), {}),
        (torch.tensor(0.25), {}),
        ({"score": np.int64(1), "acc": torch.tensor(True), "text": "x"}, {"acc": True, "text": "x"}),
        (Score(1.0, True), {"acc": True}),
        ((1.0, {"format": 1}), {"format": 1}),
    ],
)
def test_a_result_is_a_number_alone_or_with_other_values(result, values):
    score, found = read_result(result, "here")
    first = result[0] if isinstance(result, tuple) else getattr(result, "score", result)
    assert type(score) is float and score == float(first["score"] if isinstance(first, dict) else first)
    assert found == values and [type(value) for value in found.values()] == [type(v) for v in values.values()]


@pytest.mark.parametrize(
    "result",
    [None, float("nan"), "1.0", [1.0], (1.0, 2.0), torch.ones(1), {"acc": 1.0}, {"score": None}, Score, object()],
)
def test_what_holds_no_finite_number_is_refused(result):
    with pytest.raises(
        ResultError, match="^here returned .*; expected a finite number, a dict or .*, for one response"
    ):
        read_result(result, "here")


def write_function(tmp_path, code):
    (tmp_path / "own.py").write_text(code)
    return str(tmp_path / "own.py"), "compute_score", {"k": 1}


ALL = "data_source, solution_str, ground_truth, extra_info"
REFUSED = {
    "def compute_score(data_source, solution_str, ground_truth, k):\n    return 1.0\n": (
        "own.py:1: compute_score: got an unexpected keyword argument 'extra_info'; expected compute_score.*, k"
    ),
    f"def compute_score({ALL}, k, model):\n    return 1.0\n": "own.py:1: .* missing a required argument: 'model'",
    "def compute_score(data_sources, solution_strs, ground_truths, extra_infos):\n    return [1.0]\n": "own.py:1: .*",
    "def score(): ...\n": "own.py does not define compute_score; set `function`",
}


@pytest.mark.parametrize(("code", "words"), REFUSED.items())
def test_a_function_that_verl_cannot_call_is_refused_before_it_is_called(tmp_path, code, words):
    with pytest.raises(ResultError, match=words):
        score_response(*write_function(tmp_path, code), KEYWORDS)


def test_a_function_of_verls_contract_may_take_more_and_is_loaded_once(tmp_path):
    code = "import json\ncalls = []\ndef compute_score(solution_str, k=0, **rest):\n    calls.append(k)\n"
    given = write_function(tmp_path, f"{code}    return len(calls), {{'k': k, 'n': len(rest)}}\n")
    score_response(*given)
    assert score_response(*given, KEYWORDS) == (1.0, {"k": 1, "n": 3})
    assert score_response(*given, KEYWORDS)[0] == 2.0


def test_a_compiled_function_needs_no_signature(tmp_path):
    path, name, _ = write_function(tmp_path, "compute_score = dict\n")
    assert score_response(path, name, {"score": 0.5}, KEYWORDS) == (0.5, KEYWORDS)


@pytest.mark.parametrize(
    "code", [f"\nasync def compute_score({ALL}, k): ...\n", "async def a(): ...\ncompute_score = lambda **_: a()\n"]
)
def test_an_async_function_is_refused(tmp_path, code):
    with pytest.raises(ResultError, match="own.py:2: compute_score is async.* calls asyncio.run"):
        score_response(*write_function(tmp_path, code), KEYWORDS)


def test_the_documented_reward_scores_the_documented_data(tmp_path):
    """Build the sample that README.md names, and score right and wrong answers by its function."""
    text = (ROOT / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "own.py").write_text(code)
    given = f"input={ROOT / 'data' / 'deepscaler_sample.json'}"
    assert "data build data/sample.yaml" in text
    assert build_data(read_settings(ROOT / "data" / "sample.yaml", [given], tmp_path / "out"))[0] == 0
    rows = parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist()
    assert len(rows) > 200
    for row in rows:
        gold = row["reward_model"]["ground_truth"]
        assert "\\boxed{}" in row["prompt"][-1]["content"]
        for answer, expected in ((f"So it is $\\boxed{{{gold}}}$.", 1.0), (rf"Not {gold}: \boxed{{{gold}1}}", 0.0)):
            keywords = {**KEYWORDS, "ground_truth": gold, "solution_str": answer}
            found = score_response(str(tmp_path / "own.py"), "compute_score", {}, keywords)
            assert found == (expected, {"acc": expected}), row
