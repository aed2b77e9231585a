"""Reading problems: both schemas, three kinds of file, and the line of every bad row."""

import json

import pyarrow as pa
import pyarrow.parquet
import pytest

from verl_patches.errors import ConfigError
from verl_patches.rewards.sources import read_problems

GOOD = {"problem": "What is 1 + 1?", "answer": "2", "solution": "It is $\\boxed{2}$."}
GSM = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}


def write(folder, text, name="rows.json"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("indent", [None, 0, 2, 7])
def test_json_lists_however_they_are_printed(tmp_path, indent):
    rows = [GOOD, {**GOOD, "problem": 'Brackets ] and , in "text"\n'}, GSM]
    path = write(tmp_path, json.dumps(rows, indent=indent))
    problems, bad = read_problems(path)
    assert bad == []
    assert [p.answer for p in problems] == ["2", "2", "1042"]
    assert [p.data_source for p in problems] == ["deepscaler", "deepscaler", "openai/gsm8k"]
    assert problems[1].question == rows[1]["problem"]
    assert problems[2].solution == GSM["answer"]


def test_lines_of_a_pretty_printed_list(tmp_path):
    rows = [GOOD, {**GOOD, "answer": " "}, {"problem": "no answer"}, GOOD, ["list"], {"other": 1}]
    text = json.dumps(rows, indent=2)
    path = write(tmp_path, "\n\n" + text)
    problems, bad = read_problems(path)
    lines = ("\n\n" + text).split("\n")
    starts = [i + 1 for i, line in enumerate(lines) if line in ("  {", "  [")]
    assert [p.origin for p in problems] == [f"rows.json:{starts[0]}", f"rows.json:{starts[3]}"]
    assert [line.split(": ")[0] for line in bad] == [f"{path}:{starts[i]}" for i in (1, 2, 4, 5)]
    assert 'expected "answer" to hold text' in bad[0]
    assert 'expected "answer" to be a string, found NoneType' in bad[1]
    assert "expected an object, found list" in bad[2]
    assert "found the keys ['other']" in bad[3]


@pytest.mark.parametrize(
    ("answer", "read"), [(7, "7"), (2.5, "2.5"), (" 3 ", "3"), (True, None), (float("nan"), None), ("x" * 513, None)]
)
def test_answers(tmp_path, answer, read):
    problems, bad = read_problems(write(tmp_path, json.dumps([{**GOOD, "answer": answer}])))
    assert [p.answer for p in problems] == ([] if read is None else [read])
    assert len(bad) == (read is None)


@pytest.mark.parametrize("solution", [None, "", "text"])
def test_a_solution_may_be_missing(tmp_path, solution):
    problems, bad = read_problems(write(tmp_path, json.dumps([{**GOOD, "solution": solution}])))
    assert (problems[0].solution, bad) == (solution or "", [])


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ('[\n {"problem": "a", "answer": "1"},\n {"problem": oops}\n]', 3, "not JSON"),
        ('[\n {"problem": "a", "answer": "1"}\n {"problem": "b", "answer": "1"}]', 3, 'expected ","'),
        ('[\n {"problem": "a", "answer": "1"},\n]', 3, "not JSON"),
        ('[\n {"problem": "a", "answer": "1"}\n', 3, "not JSON"),
        ('[\n {"problem": "a", "answer": "1"}]\n\n x', 2, "more text after the list"),
        ("7", 1, "expected a JSON list"),
        ("", 1, "expected a JSON list"),
        ("[]", 1, "expected rows, found none"),
        ('[{"problem": "\\ud800", "answer": "1"}]', 1, "surrogates not allowed"),
    ],
)
def test_broken_json_is_named_by_line(tmp_path, text, line, what):
    path = write(tmp_path, text)
    _, bad = read_problems(path)
    assert len(bad) == 1
    assert bad[0].startswith(f"{path}:{line}: ")
    assert what in bad[0]


def test_json_lines(tmp_path):
    path = write(tmp_path, f"{json.dumps(GSM)}\n\n{{broken\n{json.dumps({**GSM, 'answer': '42'})}\n", "g.jsonl")
    problems, bad = read_problems(path)
    assert [p.origin for p in problems] == ["g.jsonl:1"]
    assert [line.split(": ")[0] for line in bad] == [f"{path}:3", f"{path}:4"]
    assert '"#### 42"' in bad[1]
    assert read_problems(write(tmp_path, json.dumps(GSM) + "\n", "lines.json"))[0][0].answer == "1042"


def test_parquet(tmp_path):
    path = tmp_path / "g.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([GSM, {**GSM, "answer": "none"}]), path)
    problems, bad = read_problems(path)
    assert [p.answer for p in problems] == ["1042"]
    assert bad[0].startswith(f"{path}:2: ")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        read_problems(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match="expected a file ending in"):
        read_problems(write(tmp_path, "", "rows.csv"))
    with pytest.raises(ConfigError, match="expected a parquet file"):
        read_problems(write(tmp_path, "PAR", "rows.parquet"))
    (tmp_path / "latin.json").write_bytes(b'[\n{"problem": "\xe9"}]')
    with pytest.raises(ConfigError, match=r"latin\.json:2: expected UTF-8"):
        read_problems(tmp_path / "latin.json")
