"""Reading maths problems from files in the schemas of DeepScaleR and GSM8K; every bad row is named by file and line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.rewards.maths import MAX_ANSWER_CHARS

_GSM8K_ANSWER = re.compile(r"####[ \t]*(\S[^\n]*?)\s*\Z")
_BLANK = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True)
class Problem:
    """One problem: texts, the data_source verl logs it under, and its origin as "file:line"."""

    question: str
    answer: str
    solution: str
    data_source: str
    origin: str


def read_problems(path: Path) -> tuple[list[Problem], list[str]]:
    """All problems of a .json, .jsonl or .parquet file, and one sentence, with file and line, for each row that is bad.

    Rows are {problem, answer[, solution]} (DeepScaleR) or {question, answer} with the answer ending in "#### 42"
    (GSM8K). A line is where the row begins, also in a pretty-printed list; in a parquet file it is the row, counted
    from 1.

    Raises ConfigError for a missing file and for an ending other than these three.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file: give a .json, .jsonl or .parquet file")
    readers = {".json": _json_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}
    if path.suffix not in readers:
        raise ConfigError(
            f"{path}: expected a file ending in {', '.join(readers)}, found {path.suffix or 'no ending'!r}"
        )
    problems: list[Problem] = []
    bad: list[str] = []
    for line, row in readers[path.suffix](path):
        origin = f"{path.name}:{line}"
        try:
            if isinstance(row, Exception):
                raise row
            problems.append(_problem(row, origin))
        except ValueError as why:
            bad.append(f"{path}:{line}: {why}")
    if not problems and not bad:
        bad.append(f"{path}:1: expected rows, found none")
    return problems, bad


def _problem(row: Any, origin: str) -> Problem:
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, found {type(row).__name__}")
    if "problem" in row:
        solution = row.get("solution")
        return Problem(
            question=_text(row, "problem"),
            answer=_answer(row.get("answer")),
            solution="" if solution is None else _text(row, "solution", may_be_empty=True),
            data_source="deepscaler",
            origin=origin,
        )
    if "question" in row:
        solution = _text(row, "answer")
        match = _GSM8K_ANSWER.search(solution)
        if not match:
            raise ValueError('expected "answer" to end in a line "#### 42"')
        answer = _answer(match.group(1).replace(",", ""))
        return Problem(_text(row, "question"), answer, solution, "openai/gsm8k", origin)
    raise ValueError(f'expected "problem" or "question", found the keys {sorted(map(str, row))}')


def _text(row: dict[str, Any], key: str, may_be_empty: bool = False) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f'expected "{key}" to be a string, found {type(value).__name__}')
    if not value.strip() and not may_be_empty:
        raise ValueError(f'expected "{key}" to hold text, found it empty')
    value.encode("utf-8")  # a lone surrogate cannot be stored; UnicodeEncodeError is a ValueError
    return value


def _answer(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    answer = _text({"answer": value}, "answer").strip()
    if len(answer) > MAX_ANSWER_CHARS:
        raise ValueError(f'expected "answer" to have at most {MAX_ANSWER_CHARS} characters, found {len(answer)}')
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
    if text[position : position + 1] == "{":  # JSON lines under the wrong ending
        yield from _jsonl_rows(path)
        return
    if text[position : position + 1] != "[":
        yield 1, ValueError("expected a JSON list of objects")
        return
    decoder = json.JSONDecoder()
    line, counted, position = 1, 0, _BLANK.match(text, position + 1).end()
    while text[position : position + 1] != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            row, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError as why:
            yield why.lineno, ValueError(f"not JSON: {why.msg} in column {why.colno}; nothing after it was read")
            return
        yield line, row
        position = _BLANK.match(text, position).end()
        if text[position : position + 1] == ",":
            position = _BLANK.match(text, position + 1).end()
            if text[position : position + 1] != "]":
                continue
        elif text[position : position + 1] == "]":
            continue
        yield text.count("\n", 0, position) + 1, ValueError('not JSON: expected "," and a row, or "]"; reading stopped')
        return
    if text[position + 1 :].strip():
        yield text.count("\n", 0, position) + 1, ValueError("not JSON: there is more text after the list")


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    for line, text in enumerate(_read_text(path).split("\n"), start=1):
        if text.strip():
            try:
                yield line, json.loads(text)
            except json.JSONDecodeError as why:
                yield line, ValueError(f"not JSON: {why.msg} in column {why.colno}")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as why:
        raise ConfigError(f"{path}: expected a parquet file: {why}") from why
    yield from enumerate(table.to_pylist(), start=1)
