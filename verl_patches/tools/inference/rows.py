"""Read the prompts of `generate` and `eval`, and write their output as JSON lines."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.shared_files import PARTIAL, lock_file, sync
from verl_patches.tools.data.sources import ENDINGS, prompt_tokens, read_rows


class Prompt(NamedTuple):
    """Hold a row, its number in all files from 0, and its prompt as tokens."""

    number: int
    row: dict[str, Any]
    tokens: list[int]


def read_prompts(
    files: Sequence[Path], key: str, tokenizer: Any, most: int, skip: bool = False, columns: Sequence[str] = ()
) -> tuple[list[Prompt], int]:
    """Return (the prompts of JSON and parquet files in order, how many were left out).

    key: the column of prompts: messages for the tokenizer's chat template, or literal text. most: tokens of a
    prompt; longer ones are refused, or left out with `skip`, as verl does with data.filter_overlong_prompts. columns:
    others to read. Raise ConfigError, with file and row, for a row that cannot be used.
    """
    prompts, left_out = list[Prompt](), 0
    for file in files:
        for line, row in _read_columns(file, (key, *columns)):
            try:
                tokens = prompt_tokens(tokenizer, row.get(key))
                if len(tokens) > most and not skip:
                    raise ValueError(f"expected a prompt of at most {most} tokens, found {len(tokens)}")
            except ValueError as error:
                raise ConfigError(f"{file}:{line}: column {key}: {error}") from None
            if len(tokens) > most:
                left_out += 1
            else:
                prompts.append(Prompt(len(prompts) + left_out, row, tokens))
    if not prompts:
        raise ConfigError(f"{', '.join(map(str, files)) or 'no file'}: expected rows with a prompt, found none")
    return prompts, left_out


def _read_columns(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line, or row from 1, values) of each row."""
    if file.suffix not in ENDINGS or not file.is_file():
        found = "another path" if file.exists() else "no file"
        raise ConfigError(f"{file}: expected a file that ends in {', '.join(ENDINGS)}, found {found}")
    for line, row in read_rows(file, columns):
        if not isinstance(row, dict):
            found = str(row) if isinstance(row, ValueError) else type(row).__name__
            raise ConfigError(f"{file}:{line}: expected a JSON object, found {found}")
        yield line, {name: row[name] for name in columns if name in row}


def _json_value(value: Any) -> Any:
    """Return a JSON value for numbers and arrays of numpy, and for dates, decimals and bytes of parquet."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Lines:
    """Hold the lines of an output while it is written; count: their number."""

    def __init__(self, path: Path, file: Any, count: int):
        self.path, self._file, self.count = path, file, count

    def add(self, line: Mapping[str, Any]) -> None:
        """Append one line; a kill may cut it, and the next call then removes it."""
        left = memoryview((json.dumps(line, default=_json_value) + "\n").encode())
        while left:
            left = left[self._file.write(left) :]
        self.count += 1

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield all lines."""
        with self.path.open("rb") as file:
            yield from map(json.loads, file)


@contextmanager
def resumable_output(output: Path, settings: Mapping[str, Any]) -> Iterator[Lines]:
    """Yield lines that become `output` if the block ends well, and otherwise wait for a call with the same settings.

    Until then they are in a file whose name has the settings' digest. Raise ConfigError where `output` exists, or
    another process writes it.
    """
    digest = hashlib.sha256(json.dumps(settings, default=_json_value).encode()).hexdigest()[:8]
    try:
        if os.path.lexists(output):
            raise ConfigError(f"{output}: expected a new file, found an existing one; give another path, or remove it")
        partial = output.with_name(f"{output.name}.{digest}{PARTIAL}")
        output.parent.mkdir(parents=True, exist_ok=True)
        file = lock_file(partial)
    except BlockingIOError:
        raise ConfigError(f"{partial}: another process is writing it; wait, or give another output") from None
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error}); give another output") from None
    with file:
        with partial.open("rb") as written:
            sizes = [len(line) for line in written if line.endswith(b"\n")]
        file.truncate(sum(sizes))
        yield Lines(partial, file, len(sizes))
        sync(partial)
        os.replace(partial, output)
