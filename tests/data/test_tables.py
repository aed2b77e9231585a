"""Reading problems (both schemas, three kinds of file, the line of every bad row), splitting and writing tables."""

import json
import os

import pyarrow as pa
import pyarrow.parquet
import pytest

from data.tables import read_problems, shuffled_split, verl_row, write_tables
from verl_patches.errors import ConfigError

ROWS = [verl_row("source", f"question {i}", str(i), "math", origin=f"f:{i}") for i in range(50)]


def questions(rows):
    return [row["prompt"][0]["content"] for row in rows]


def test_split_keeps_every_row_once_and_depends_on_the_seed_only():
    train, test = shuffled_split(ROWS, 0.2, seed=3)
    assert (len(train), len(test)) == (40, 10)
    assert sorted(questions(train) + questions(test)) == sorted(questions(ROWS))
    assert questions(train) != questions(ROWS)[10:]
    assert shuffled_split(ROWS, 0.2, seed=3) == (train, test) != shuffled_split(ROWS, 0.2, seed=4)
    assert [row["extra_info"]["index"] for row in train] == list(range(40))
    assert {row["extra_info"]["split"] for row in test} == {"test"}


def test_sizes_of_the_test_set():
    sizes = {0.001: 1, 0.1: 5, 1: 1, 7: 7, 49: 49}
    assert {size: len(shuffled_split(ROWS, size, seed=0)[1]) for size in sizes} == sizes
    for size in (0, -1, 1.5, 50, 0.999, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="test size"):
            shuffled_split(ROWS, size, seed=0)


def test_tables_are_written_completely_and_never_overwritten_by_default(tmp_path):
    folder, tables = tmp_path / "new" / "folder", shuffled_split(ROWS, 0.2, seed=0)
    for path, rows in zip(write_tables(folder, *tables), tables, strict=True):
        assert pyarrow.parquet.read_table(path).to_pylist() == rows
    with pytest.raises(ConfigError, match=r"train\.parquet.*test\.parquet.*--overwrite"):
        write_tables(folder, ROWS[5:], ROWS[:5])
    with pytest.raises(Exception, match="struct|list|convert"):
        write_tables(folder, ROWS, [{**ROWS[0], "prompt": 7}], overwrite=True)
    assert pyarrow.parquet.read_table(folder / "train.parquet").num_rows == 40  # both times the old files stay
    assert sorted(os.listdir(folder)) == ["test.parquet", "train.parquet"]
    write_tables(folder, ROWS[5:], ROWS[:5], overwrite=True)
    assert pyarrow.parquet.read_table(folder / "train.parquet").num_rows == 45
    with pytest.raises(ConfigError, match="found a file"):
        write_tables(folder / "test.parquet", ROWS[5:], ROWS[:5])


GOOD = {"problem": "What is 1 + 1?", "answer": "2", "solution": "It is $\\boxed{2}$."}
GSM = {"question": "How many?", "answer": "6 * 7 = <<6*7=42>>42\n#### 1,042"}


def write(folder, text, name="rows.json"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("indent", [None, 0, 2, 7])
def test_json_lists_however_they_are_printed(tmp_path, indent):
    rows = [GOOD, {**GOOD, "problem": 'Brackets ] and , in "text"\n'}, GSM]
    problems, bad = read_problems(write(tmp_path, json.dumps(rows, indent=indent)))
    assert bad == []
    assert [(p.answer, p.data_source) for p in problems] == [("2", "deepscaler")] * 2 + [("1042", "openai/gsm8k")]
    assert problems[1].question == rows[1]["problem"] and problems[2].solution == GSM["answer"]


def test_lines_of_a_pretty_printed_list(tmp_path):
    rows = [GOOD, {**GOOD, "answer": " "}, {"problem": "no answer"}, GOOD, ["list"], {"other": 1}]
    path = write(tmp_path, "\n\n" + json.dumps(rows, indent=2))
    problems, bad = read_problems(path)
    starts = [i for i, line in enumerate(path.read_text().split("\n"), 1) if line in ("  {", "  [")]
    assert [p.origin for p in problems] == [f"rows.json:{starts[0]}", f"rows.json:{starts[3]}"]
    assert [line.split(": ")[0] for line in bad] == [f"{path}:{starts[i]}" for i in (1, 2, 4, 5)]
    words = (
        "to hold text",
        "to be a string, found NoneType",
        "an object, found list",
        "--answer-key), found ['other']",
    )
    assert all(word in line for word, line in zip(words, bad, strict=True))


def test_answers_and_solutions(tmp_path):
    rows = [{**GOOD, "answer": answer} for answer in (7, 2.5, " 3 ", True, float("nan"), "x" * 513)]
    problems, bad = read_problems(write(tmp_path, json.dumps(rows)))
    assert [p.answer for p in problems] == ["7", "2.5", "3"] and len(bad) == 3
    rows = [{**GOOD, "solution": solution} for solution in (None, "", "text")]
    problems, bad = read_problems(write(tmp_path, json.dumps(rows)))
    assert ([p.solution for p in problems], bad) == (["", "", "text"], [])


@pytest.mark.parametrize(
    ("text", "line", "message"),
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
        ("[" * 100_000, 1, "cannot be read: maximum recursion depth"),
        ('[{"problem": "a", "answer": ' + "9" * 5000 + "}]", 1, "cannot be read: Exceeds the limit"),
        ('[{"problem": "a", "answer": ' + "9" * 600 + "}]", 1, "at most 512 characters, found 600"),
    ],
)
def test_broken_json_is_named_by_line(tmp_path, text, line, message):
    path = write(tmp_path, text)
    (bad,) = read_problems(path)[1]
    assert bad.startswith(f"{path}:{line}: ") and message in bad


def test_json_lines_and_parquet(tmp_path):
    path = write(tmp_path, f"{json.dumps(GSM)}\n\n{{broken\n{json.dumps({**GSM, 'answer': '42'})}\n", "g.jsonl")
    problems, bad = read_problems(path)
    assert [p.origin for p in problems] == ["g.jsonl:1"]
    assert [line.split(": ")[0] for line in bad] == [f"{path}:3", f"{path}:4"]
    assert '"#### 42"' in bad[1]
    assert read_problems(write(tmp_path, json.dumps(GSM) + "\n", "lines.json"))[0][0].answer == "1042"
    path = tmp_path / "g.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([GSM, {**GSM, "answer": "none"}]), path)
    problems, bad = read_problems(path)
    assert [p.answer for p in problems] == ["1042"] and bad[0].startswith(f"{path}:2: ")


def test_rows_of_another_schema_by_their_keys(tmp_path):
    path = write(tmp_path, json.dumps([{"q": "1 + 1?", "a": 2}, {"q": "2 + 2?"}]))
    problems, bad = read_problems(path, ("q", "a"))
    assert [(p.question, p.answer) for p in problems] == [("1 + 1?", "2")]
    assert len(bad) == 1 and 'expected "a" to be a string, found NoneType' in bad[0]


def test_a_parquet_file_with_any_bit_flipped_is_read_or_refused(tmp_path):
    path = tmp_path / "g.parquet"
    pyarrow.parquet.write_table(pa.Table.from_pylist([GSM] * 20), path)
    content, refused = path.read_bytes(), 0
    for at in range(0, len(content), 37):
        path.write_bytes(content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :])
        try:
            read_problems(path)
        except ConfigError:
            refused += 1
    assert refused > 3


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path, "", "rows.csv")
    write(tmp_path, "PAR", "rows.parquet")
    (tmp_path / "latin.json").write_bytes(b'[\n{"problem": "\xe9"}]')
    for name, message in {
        "missing.json": "no such file",
        "rows.csv": "expected a file ending in",
        "rows.parquet": "expected a parquet file",
        "latin.json": r"latin\.json:2: expected UTF-8",
    }.items():
        with pytest.raises(ConfigError, match=message):
            read_problems(tmp_path / name)
