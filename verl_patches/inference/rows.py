"""Files of `generate` and `eval`: prompts in, JSON lines out.

A file is read a row at a time, once to check all rows before an engine starts, and once to send them. Output is written
to OUTPUT.partial in the order of rows, after a line with the settings; a second call goes on after its last whole line.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.shared_files import PARTIAL, lock_file, replacing

LONGEST_LINE = 16 << 20  # bytes of a row in JSON, and of one row's values in a parquet file
MOST_ROWS, MOST_MESSAGES = 50_000_000, 10_000
TEMPLATE_CPU_S = 10.0  # of one prompt: a template may loop
_ROLES = ("system", "user", "assistant", "tool")


class Prompt(NamedTuple):
    """A row: its number in all files from 0, its values, and its prompt as tokens."""

    number: int
    row: dict[str, Any]
    tokens: list[int]


class Prompts:
    """The prompts of `files` (.jsonl or .parquet), column `key`: messages, or text, which is taken as it is.

    longest: most tokens of a prompt. skip: whether longer ones are left out, as verl does with
    data.filter_overlong_prompts; else they are refused. columns: others that are read. check: of a row's values, raises
    ValueError. Iterating reads the files. ConfigError that names file and row for anything else.
    """

    def __init__(
        self,
        files: Sequence[Path],
        key: str,
        tokenizer: Any,
        longest: int,
        skip: bool = False,
        columns: Sequence[str] = (),
        check: Callable[[Mapping[str, Any]], None] = lambda row: None,
    ):
        self.files, self.key, self.tokenizer, self.columns, self.check = files, key, tokenizer, columns, check
        self.most_tokens, self.skip = longest, skip
        self.skipped = self.count = self.longest = 0
        digest = hashlib.sha256()
        for prompt in self:
            self.count += 1
            self.longest = max(self.longest, len(prompt.tokens))
            digest.update(array("q", [prompt.number, *prompt.tokens]).tobytes())
        self.digest = digest.hexdigest()[:16]
        if not self.count:
            raise ConfigError(f"{files[0]}: expected rows with a column {key}, found {self.skipped} too long ones only")

    def __iter__(self) -> Iterator[Prompt]:
        number = -1
        self.skipped = 0
        for file in self.files:
            for place, row in _rows(file, (self.key, *self.columns)):
                number += 1
                try:
                    if number >= MOST_ROWS:
                        raise ValueError(f"expected at most {MOST_ROWS} rows")
                    self.check(row)
                    tokens = prompt_tokens(self.tokenizer, row, self.key)
                    if len(tokens) > self.most_tokens and not self.skip:
                        raise ValueError(f"the prompt has {len(tokens)} tokens, expected at most {self.most_tokens}")
                except ValueError as error:
                    raise ConfigError(f"{file}:{place}: {error}") from None
                if len(tokens) > self.most_tokens:
                    self.skipped += 1
                else:
                    yield Prompt(number, row, tokens)


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder of weights; ConfigError without one. Code of the folder is not run."""
    from transformers import AutoTokenizer
    from transformers.utils import logging

    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not any((folder / name).is_file() for name in names):
        raise ConfigError(f"{folder}: has no tokenizer; expected {names[0]} and {names[2]}: copy them from the model's")
    logging.set_verbosity_error()
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # any: the library has no error of its own
        text = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{folder}: its tokenizer cannot be read ({type(error).__name__}: {text:.300})") from None


def prompt_tokens(tokenizer: Any, row: Mapping[str, Any], key: str) -> list[int]:
    """The tokens of a row's prompt; ValueError where it has none."""
    prompt = row.get(key)
    if isinstance(prompt, str) and prompt:
        tokens = tokenizer(prompt)["input_ids"]
    else:
        tokens = tokenizer(render(tokenizer, prompt, key), add_special_tokens=False)["input_ids"]
    if not tokens:
        raise ValueError(f"the prompt in column {key} has no tokens")
    return tokens


def render(tokenizer: Any, messages: Any, key: str = "prompt") -> str:
    """Messages as the tokenizer's chat template writes them, ready for an answer; as verl's RLHFDataset does.

    ValueError for other values, and for a template that fails or takes more than TEMPLATE_CPU_S.
    """
    if not isinstance(messages, list) or not 0 < len(messages) <= MOST_MESSAGES:
        found = "none" if messages is None else f"{type(messages).__name__} of {len(str(messages)[:99])} characters"
        raise ValueError(f"expected column {key} with text or a list of messages, found {found}")
    for message in messages:
        fits = isinstance(message, dict) and message.get("role") in _ROLES and isinstance(message.get("content"), str)
        if not fits:
            raise ValueError(f"expected {key} with role ({', '.join(_ROLES)}) and content (text) in each message")
    if not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; expected one for messages, or text in the column")
    try:
        with _cpu_limit(TEMPLATE_CPU_S):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:
        raise ValueError(f"the chat template failed: {type(error).__name__}: {str(error)[:200]}") from None
    if len(text) > LONGEST_LINE:
        raise ValueError(f"the chat template made {len(text)} characters, expected at most {LONGEST_LINE}")
    return text


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """TimeoutError after that CPU time of this process."""

    def end(*_: object) -> None:
        raise TimeoutError(f"it took more than {seconds:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, or row from 1, values) of each row."""
    readers = {".jsonl": _json_rows, ".parquet": _parquet_rows}
    try:
        if not file.is_file():
            raise ConfigError(f"{file}: expected a file of prompts, found none; give a .jsonl or .parquet file")
        if file.suffix not in readers:
            raise ConfigError(f"{file}: expected a file ending in .jsonl or .parquet, found {file.suffix!r}")
        yield from readers[file.suffix](file, columns)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error})") from None


def _json_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(LONGEST_LINE + 1):
            number += 1
            try:
                if len(line) > LONGEST_LINE:
                    raise ValueError(f"expected at most {LONGEST_LINE} bytes in a line, found more")
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise ValueError(f"expected a JSON object, found {type(row).__name__}")
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{file}:{number}: {error}") from None
            yield number, {name: row[name] for name in columns if name in row}


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(file) as table:
            here = [name for name in columns if name in table.schema_arrow.names]
            number = 0
            for batch in table.iter_batches(batch_size=64, columns=here):
                if batch.nbytes > 64 * LONGEST_LINE:
                    raise ValueError(f"rows from {number + 1} on: expected at most {LONGEST_LINE} bytes a row")
                for row in batch.to_pylist() if here else ({} for _ in range(batch.num_rows)):
                    number += 1
                    yield number, row
    except (pyarrow.ArrowException, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{file}: cannot be read as a parquet file: {str(error)[:300]}") from None


class Lines:
    """OUTPUT.partial while it is written. done: its lines, without that of the settings."""

    def __init__(self, path: Path, file: Any, done: int):
        self.path, self._file, self.done = path, file, done

    def add(self, line: Mapping[str, Any]) -> None:
        """Append one line, whole or, where this process is killed, cut, which the next call removes."""
        left = memoryview((json.dumps(line) + "\n").encode())
        while left:
            left = left[self._file.write(left) :]
        self.done += 1

    def read(self) -> Iterator[dict[str, Any]]:
        """The lines."""
        with self.path.open("rb") as file:
            next(file)
            for line in file:
                yield json.loads(line)


@contextmanager
def resumable(output: Path, settings: Mapping[str, Any]) -> Iterator[Lines]:
    """The lines of `output`, which gets its name where the block ends well; after an error they stay in the partial.

    ConfigError where `output` is there, where it was begun with other settings, and where another process writes it.
    """
    partial, head = output.with_name(output.name + PARTIAL), json.dumps({"settings": settings}) + "\n"
    try:
        if os.path.lexists(output):
            raise ConfigError(f"{output} is there already; give another output, or remove it")
        output.parent.mkdir(parents=True, exist_ok=True)
        file = lock_file(partial)
    except BlockingIOError:
        raise ConfigError(f"{partial} is written by another process; wait for it, or give another output") from None
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error}); give another output") from None
    with file:
        done, size = _whole_lines(partial, json.loads(head)["settings"])
        file.truncate(size)
        if not size:
            file.write(head.encode())
        lines = Lines(partial, file, done)
        yield lines
        with replacing(output, durable=True) as new, partial.open("rb") as written, new.open("wb") as final:
            next(written)
            while block := written.read(1 << 20):
                final.write(block)
        partial.unlink()


def _whole_lines(partial: Path, settings: Mapping[str, Any]) -> tuple[int, int]:
    """(whole lines after the first, bytes up to their end) of a file that was begun with `settings`."""
    with partial.open("rb") as file:
        first = file.readline(1 << 20)
        if not first.endswith(b"\n"):
            return 0, 0
        try:
            begun = json.loads(first)["settings"]
            unlike = [name for name in begun | settings if begun.get(name) != settings.get(name)]
        except (ValueError, TypeError, LookupError, RecursionError):
            raise ConfigError(
                f"{partial}: expected the beginning of an output, found other content; remove it"
            ) from None
        if unlike:
            name = unlike[0]
            raise ConfigError(
                f"{partial} was begun with {name} {begun.get(name)}, this call has {settings.get(name)}; give the same "
                "settings to go on, another output, or remove it"
            )
        done, size = 0, len(first)
        for line in file:
            if not line.endswith(b"\n"):
                break
            done, size = done + 1, size + len(line)
        return done, size
