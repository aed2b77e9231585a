"""Task tables: reading problems from files, rows in the schema that verl's RLHFDataset reads, split and written.

Files are in the schemas of DeepScaleR and GSM8K; every bad row is named by file and line.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.rewards.maths import MAX_ANSWER_CHARS
from verl_patches.shared_files import replacing

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]
_GSM8K_ANSWER = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")
_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Problem:
    """One problem: texts, the data_source that verl logs it under, and its origin as "file:line"."""

    question: str
    answer: str
    solution: str
    data_source: str
    origin: str


def read_problems(path: Path, keys: tuple[str, str] | None = None) -> tuple[list[Problem], list[str]]:
    """All problems of a .json, .jsonl or .parquet file, and one sentence, with file and line, for each row that is bad.

    Rows are {problem, answer[, solution]} (DeepScaleR) or {question, answer} with the answer ending in "#### 42"
    (GSM8K). A line is where the row begins, also in a pretty-printed list; in a parquet file it is the row, counted
    from 1. `keys`: (question, answer) of rows in another schema, whose answer is used as it is.

    Raises ConfigError for a missing file and for an ending other than these three.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file: give a .json, .jsonl or .parquet file")
    readers = {".json": _json_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        found = path.suffix or "no ending"
        raise ConfigError(f"{path}: expected a file ending in {', '.join(readers)}, found {found!r}")
    problems: list[Problem] = []
    bad: list[str] = []
    for line, row in readers[path.suffix](path):
        origin = f"{path.name}:{line}"
        try:
            if isinstance(row, Exception):
                raise row
            problems.append(_problem(row, origin, keys))
        except ValueError as why:
            bad.append(f"{path}:{line}: {why}")
    if not problems and not bad:
        bad.append(f"{path}:1: expected rows, found none")
    return problems, bad


def _problem(row: Any, origin: str, keys: tuple[str, str] | None) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    if keys:
        return Problem(_text(row, keys[0]), _answer(row.get(keys[1]), keys[1]), "", "custom", origin)
    if "problem" in row:
        question, answer = _text(row, "problem"), _answer(row.get("answer"))
        solution = "" if row.get("solution") is None else _text(row, "solution", may_be_empty=True)
        return Problem(question, answer, solution, "deepscaler", origin)
    if "question" in row:
        solution = _text(row, "answer")
        match = _GSM8K_ANSWER.search(solution)
        if not match:
            raise ValueError('expected "answer" to end in a line "#### 42"')
        answer = _answer(match[1].replace(",", ""))
        return Problem(_text(row, "question"), answer, solution, "openai/gsm8k", origin)
    raise ValueError(f'expected "problem" or "question" (or --prompt-key, --answer-key), found {sorted(map(str, row))}')


def _text(row: dict[str, Any], key: str, may_be_empty: bool = False) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f'expected "{key}" to be a string, found {type(value).__name__}')
    if not value.strip() and not may_be_empty:
        raise ValueError(f'expected "{key}" to hold text, found it empty')
    value.encode("utf-8")  # a lone surrogate cannot be stored; UnicodeEncodeError is a ValueError
    return value


def _answer(value: Any, key: str = "answer") -> str:
    is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    if is_number and not isinstance(value, bool):
        value = str(value)  # ValueError for an integer of more than 4300 digits
    answer = _text({key: value}, key).strip()
    if len(answer) > MAX_ANSWER_CHARS:
        raise ValueError(f'expected "{key}" to have at most {MAX_ANSWER_CHARS} characters, found {len(answer)}')
    return answer


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as why:
        line = path.read_bytes()[: why.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: expected UTF-8 text, found the byte {why.object[why.start]:#04x}") from why


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    text = _read_text(path)
    position = _BLANK.match(text).end()
    if text.startswith("{", position):  # JSON lines under the wrong ending
        yield from _jsonl_rows(path)
        return
    if not text.startswith("[", position):
        yield 1, ValueError("expected a JSON list of objects")
        return
    decoder, line, counted = json.JSONDecoder(), 1, 0
    position = _BLANK.match(text, position + 1).end()
    more = not text.startswith("]", position)
    try:
        while more:
            line, counted = line + text.count("\n", counted, position), position
            row, position = decoder.raw_decode(text, position)
            yield line, row
            position = _BLANK.match(text, position).end()
            more = text.startswith(",", position)
            if not more and not text.startswith("]", position):
                raise json.JSONDecodeError('expected "," and a row, or "]"', text, position)
            if more:
                position = _BLANK.match(text, position + 1).end()
        if text[position + 1 :].strip():
            raise json.JSONDecodeError("more text after the list", text, position)
    except json.JSONDecodeError as why:
        message = f"not JSON: {why.msg} in column {why.colno}; reading stopped there"
        yield why.lineno, ValueError(message)
    except (ValueError, RecursionError) as why:  # an integer of too many digits, too many nested brackets
        yield line, ValueError(f"cannot be read: {why}; reading stopped there")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(_read_text(path).split("\n"), start=1):
        if text.strip():
            try:
                yield line, json.loads(text)
            except json.JSONDecodeError as why:
                yield line, ValueError(f"not JSON: {why.msg} in column {why.colno}")
            except (ValueError, RecursionError) as why:
                yield line, ValueError(f"cannot be read: {why}")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, MemoryError) as why:
        raise ConfigError(f"{path}: expected a parquet file, found one that cannot be read: {why}") from why
    yield from enumerate(rows, start=1)


def verl_row(
    data_source: str, prompt: str, ground_truth: str, ability: str, solution: str = "", origin: str = ""
) -> Row:
    """One row of verl's schema: data_source, prompt (one user message), ability, reward_model, extra_info.

    extra_info holds index and split (filled in by `number`), answer, solution and origin (file and line, or how it was
    made).
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": -1, "split": "", "answer": ground_truth, "solution": solution, "origin": origin},
    }


def number(rows: list[Row], split: str) -> list[Row]:
    """The same rows with extra_info.index counting from 0 and extra_info.split set; the given rows stay as they are."""
    return [{**row, "extra_info": {**row["extra_info"], "index": i, "split": split}} for i, row in enumerate(rows)]


def shuffled_split(rows: list[Row], test_size: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Shuffle by seed and split into (train, test), both numbered.

    `test_size` below 1 is a share of the rows (rounded, at least one row), from 1 on a number of rows. Raises
    ConfigError unless that leaves at least one row on either side: verl refuses an empty validation set.
    """
    if not 0 < test_size < float("inf") or (test_size >= 1 and test_size != int(test_size)):
        raise ConfigError(f"test size: expected a share in 0..1 or a whole number of rows, found {test_size}")
    test_rows = int(test_size) if test_size >= 1 else max(1, round(test_size * len(rows)))
    if test_rows >= len(rows):
        text = f"{test_rows} of {len(rows)} rows leave none to train on"
        raise ConfigError(f"test size: {text}: give a smaller test size")
    mixed = list(rows)
    Random(seed).shuffle(mixed)
    return number(mixed[test_rows:], "train"), number(mixed[:test_rows], "test")


def write_tables(folder: Path, train: list[Row], test: list[Row], overwrite: bool = False) -> tuple[Path, Path]:
    """Write folder/train.parquet and folder/test.parquet and return their paths.

    Both are written under other names and then renamed, so no reader ever sees half a file. Raises ConfigError,
    and changes nothing, if one of them exists and `overwrite` is not set, or if `folder` cannot be written to.
    """
    import pyarrow
    import pyarrow.parquet

    targets = {folder / "train.parquet": train, folder / "test.parquet": test}
    check_free(folder, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as written:
            for target, rows in targets.items():
                table = pyarrow.Table.from_pylist(rows, schema=_schema(answers="label" in rows[0]))
                pyarrow.parquet.write_table(table, written.enter_context(replacing(target)))
    except OSError as error:
        raise ConfigError(f"output {folder}: cannot be written ({error}): choose another --output") from error
    return folder / "train.parquet", folder / "test.parquet"


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise ConfigError if `write_tables` would refuse this folder; cheap, so call it before long work."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output {folder}: expected a folder or nothing, found a file: choose another --output")
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise ConfigError(f"output {folder}: {existing} cannot be written to: choose another --output")
    taken = [name for name in ("train.parquet", "test.parquet") if (folder / name).exists()]
    if taken and not overwrite:
        text = f"{' and '.join(taken)} exist already"
        raise ConfigError(f"output {folder}: {text}: choose another --output or give --overwrite")


def _schema(answers: bool) -> pyarrow.Schema:
    import pyarrow as pa

    text = pa.string()
    extra = [("index", pa.int64()), ("split", text), ("answer", text), ("solution", text), ("origin", text)]
    given = [(name, text) for name in ("response", "chosen", "rejected")]
    given += [("label", pa.bool_()), ("steps", pa.list_(text)), ("labels", pa.list_(pa.bool_()))]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(extra)),
            *(given if answers else ()),
        ]
    )
