"""Files of `generate` and `eval`: prompts in, JSON lines out.

Prompts are read a row at a time: once to check all of them before an engine starts, and once to send them. Lines are
written in the order of rows to OUTPUT.partial, below one with the settings; a second call goes on after the last whole
one.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.shared_files import PARTIAL, lock_file, replacing

ROW_BYTES, BATCH_ROWS = 16 << 20, 64  # most bytes of a row; rows of a parquet file that are read at once
TEMPLATE_CPU_S = 10.0  # of one prompt: a template may loop


class Prompt(NamedTuple):
    """A row, its number in all files from 0, and its prompt as tokens."""

    number: int
    row: dict[str, Any]
    tokens: list[int]


class Prompts:
    """The prompts of .jsonl and .parquet files, read anew by each iteration.

    key: their column: messages for the tokenizer's chat template, or text, which is taken as it is. most: tokens of a
    prompt; longer ones are refused, or left out with `skip`, as verl does with data.filter_overlong_prompts. columns:
    others that are read. ConfigError, with file and row, for what cannot be used. count, longest (tokens), left_out,
    digest: of all rows.
    """

    def __init__(
        self,
        files: Sequence[Path],
        key: str,
        tokenizer: Any,
        most: int,
        skip: bool = False,
        columns: Sequence[str] = (),
    ):
        self.files, self.key, self.tokenizer, self.most, self.skip = files, key, tokenizer, most, skip
        self.columns, self.count, self.longest, self.left_out, digest = columns, 0, 0, 0, hashlib.sha256()
        for prompt in self:
            self.count, self.longest = self.count + 1, max(self.longest, len(prompt.tokens))
            digest.update(array("q", [prompt.number, *prompt.tokens]).tobytes())
        self.digest = digest.hexdigest()[:16]
        if not self.count:
            raise ConfigError(f"{', '.join(map(str, files)) or 'no file'}: expected rows with a prompt, found none")

    def __iter__(self) -> Iterator[Prompt]:
        number = self.left_out = 0
        for file in self.files:
            for line, row in _rows(file, (self.key, *self.columns)):
                try:
                    tokens = prompt_tokens(self.tokenizer, row.get(self.key))
                    if len(tokens) > self.most and not self.skip:
                        raise ValueError(f"expected a prompt of at most {self.most} tokens, found {len(tokens)}")
                except ValueError as error:
                    raise ConfigError(f"{file}:{line}: column {self.key}: {error}") from None
                if len(tokens) <= self.most:
                    yield Prompt(number, row, tokens)
                self.left_out += len(tokens) > self.most
                number += 1


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder of weights; ConfigError without one. Code of the folder is not run."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # any: the library has no error of its own
        text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:300]}"
        raise ConfigError(f"{folder}: expected a tokenizer that can be read, found none ({text})") from None


def prompt_tokens(tokenizer: Any, prompt: Any) -> list[int]:
    """The tokens of a text, or of messages; ValueError for anything else."""
    text = prompt if isinstance(prompt, str) else render(tokenizer, prompt)
    text.encode()  # UnicodeEncodeError for half a surrogate pair
    if not (tokens := tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]):
        raise ValueError("expected a text with tokens, found none")
    return tokens


def render(tokenizer: Any, messages: Any) -> str:
    """Messages as the chat template writes them for an answer, as in verl's RLHFDataset; ValueError where it fails."""
    if not isinstance(messages, list) or not messages:
        found = "none" if messages is None else type(messages).__name__
        raise ValueError(f"expected text or a list of messages, found {found}")
    if not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise ValueError("expected role and content, both text, in each message")
    if not tokenizer.chat_template:
        raise ValueError("expected text, found messages, for which the tokenizer has no chat template")
    try:
        with _cpu_limit(TEMPLATE_CPU_S):
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # any that a template raises
        raise ValueError(f"the chat template failed: {type(error).__name__}: {str(error)[:200]}") from None
    if not 0 < len(text) <= ROW_BYTES:
        raise ValueError(f"the chat template made {len(text)} characters, expected 1 to {ROW_BYTES}")
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
    import pyarrow

    read = {".jsonl": _json_rows, ".parquet": _parquet_rows}.get(file.suffix)
    if read is None or not file.is_file():
        raise ConfigError(f"{file}: expected a .jsonl or .parquet file, found {'another' if file.exists() else 'none'}")
    number = 0
    try:
        for number, row in enumerate(read(file, columns), 1):
            if row is not None:
                yield number, {name: row[name] for name in columns if name in row}
    except (OSError, pyarrow.ArrowException, ValueError, OverflowError, MemoryError, RecursionError) as error:
        raise ConfigError(f"{file}:{number + 1}: cannot be read: {str(error)[:300]}") from None


def _json_rows(file: Path, _: Sequence[str]) -> Iterator[dict[str, Any] | None]:
    with file.open("rb") as lines:
        while line := lines.readline(ROW_BYTES + 1):
            if len(line) > ROW_BYTES:
                raise ValueError(f"expected at most {ROW_BYTES} bytes in a line, found more")
            row = json.loads(line) if line.strip() else None
            if not isinstance(row, dict | None):
                raise ValueError(f"expected a JSON object, found {type(row).__name__}")
            yield row


def _parquet_rows(file: Path, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(file) as table:
        here = [name for name in columns if name in table.schema_arrow.names]
        for batch in table.iter_batches(BATCH_ROWS, columns=here or None):
            if batch.nbytes > BATCH_ROWS * ROW_BYTES:
                raise ValueError(f"expected at most {ROW_BYTES} bytes in a row, found more")
            yield from batch.to_pylist()


class Lines:
    """OUTPUT.partial while it is written; done: lines below that of the settings."""

    def __init__(self, path: Path, file: Any, done: int):
        self.path, self._file, self.done = path, file, done

    def add(self, line: Mapping[str, Any]) -> None:
        """Append one line; a kill may cut it, and the next call removes it then."""
        left = memoryview((json.dumps(line) + "\n").encode())
        while left:
            left = left[self._file.write(left) :]
        self.done += 1

    def read(self) -> Iterator[dict[str, Any]]:
        """All lines."""
        with self.path.open("rb") as file:
            next(file)
            yield from map(json.loads, file)


@contextmanager
def resumable(output: Path, settings: Mapping[str, Any]) -> Iterator[Lines]:
    """Lines that become `output` where the block ends well; after an error or a kill they wait for the next call.

    ConfigError where `output` is there, another process writes it, or it was begun with other settings.
    """
    partial, head = output.with_name(output.name + PARTIAL), (json.dumps(settings) + "\n").encode()
    try:
        if os.path.lexists(output):
            raise ConfigError(f"{output}: expected a new file, found one: give another, or remove it")
        output.parent.mkdir(parents=True, exist_ok=True)
        file = lock_file(partial)
    except BlockingIOError:
        raise ConfigError(f"{partial}: another process writes it; wait for it, or give another output") from None
    except OSError as error:
        raise ConfigError(f"{output}: cannot be written ({error}); give another output") from None
    with file:
        with partial.open("rb") as written:
            begun = written.readline(2 * len(head) + ROW_BYTES)
            if not head.startswith(begun):
                raise ConfigError(
                    f"{partial} was begun with other settings: expected {head.decode().strip()}, found "
                    f"{begun.decode(errors='replace').strip()[:2000]}; give the same ones, another output, or remove it"
                )
            sizes = [len(line) for line in written if line.endswith(b"\n")] if begun == head else []
        file.truncate(len(head) + sum(sizes) if begun == head else 0)
        if begun != head:
            file.write(head)
        lines = Lines(partial, file, len(sizes))
        try:
            yield lines
        except BaseException:
            if not lines.done:
                partial.unlink()
            raise
        with replacing(output, durable=True) as new, partial.open("rb") as written, new.open("wb") as final:
            next(written)
            final.writelines(written)
        partial.unlink()
