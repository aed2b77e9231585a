"""Reading problems (both schemas, three kinds of file, the line of every bad row), splitting and writing tables."""

import json
import os

import pyarrow as pa
import pyarrow.parquet
import pytest

from verl_patches.errors import ConfigError
from verl_patches.rewards.tables import read_problems, shuffled_split, verl_row, write_tables

ROWS = [verl_row("source", f"question {i}", str(i), "math", origin=f"f:{i}") for i in range(50)]


def questions(rows):
    return [row["prompt"][0]["content"] for row in rows]


def test_split_keeps_every_row_once_and_depends_on_the_seed_only():
    train, test = shuffled_split(ROWS, 0.2, seed=3)
    assert (len(train), len(test)) == (40, 10)
    assert sorted(questions(train) + questions(test)) == sorted(questions(ROWS))
    assert questions(train) != questions(ROWS)[10:]
    assert shuffled_split(ROWS, 0.2, seed=3) == (train, test)
    assert shuffled_split(ROWS, 0.2, seed=4) != (train, test)
    assert [row["extra_info"]["index"] for row in train] == list(range(40))
    assert {row["extra_info"]["split"] for row in test} == {"test"}


@pytest.mark.parametrize(("size", "rows"), [(0.001, 1), (0.1, 5), (1, 1), (7, 7), (49, 49)])
def test_sizes(size, rows):
    assert len(shuffled_split(ROWS, size, seed=0)[1]) == rows


@pytest.mark.parametrize("size", [0, -1, 1.5, 50, 0.999, float("nan"), float("inf")])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ConfigError, match="test size"):
        shuffled_split(ROWS, size, seed=0)


def test_written_tables_read_back(tmp_path):
    train, test = shuffled_split(ROWS, 0.2, seed=0)
    for path, rows in zip(write_tables(tmp_path / "new" / "folder", train, test), (train, test), strict=True):
        assert pyarrow.parquet.read_table(path).to_pylist() == rows
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["test.parquet", "train.parquet"]


def test_nothing_is_overwritten_unasked(tmp_path):
    write_tables(tmp_path, ROWS[:3], ROWS[3:5])
    with pytest.raises(ConfigError, match=r"train\.parquet and test\.parquet exist already.*--overwrite"):
        write_tables(tmp_path, ROWS[5:], ROWS[:5])
    assert pyarrow.parquet.read_table(tmp_path / "train.parquet").num_rows == 3
    write_tables(tmp_path, ROWS[5:], ROWS[:5], overwrite=True)
    assert pyarrow.parquet.read_table(tmp_path / "train.parquet").num_rows == 45
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="found a file"):
        write_tables(tmp_path / "file", ROWS[5:], ROWS[:5])


def test_a_failure_leaves_the_old_files_whole(tmp_path):
    write_tables(tmp_path, ROWS[:3], ROWS[3:5])
    broken = [{**ROWS[0], "prompt": 7}]
    with pytest.raises(Exception, match="struct|list|convert"):
        write_tables(tmp_path, ROWS, broken, overwrite=True)
    assert pyarrow.parquet.read_table(tmp_path / "train.parquet").num_rows == 3
    assert sorted(os.listdir(tmp_path)) == ["test.parquet", "train.parquet"]


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
