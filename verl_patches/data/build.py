"""`data build`: read, make rows, leave out, shuffle, split, write. The same input and keys give the same bytes.

Rows go as JSON to a scratch file in the order of the input, whatever process has made them; only their places and
digests are held, 24 bytes a row. What is left out, the order and the split follow from those, and the parquet files
are then written row by row from the scratch file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from verl_patches.data.handlers import RESPONSES, Record, Row, make_row, schema_of
from verl_patches.data.output import MANIFEST, TEST, TRAIN, whole_folder, write_rows
from verl_patches.data.settings import REASONS, Settings
from verl_patches.data.sources import Item, Source, chunks_of, file_facts, parse, sources_of
from verl_patches.data.templates import template_of
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.processes import die_with_parent

SHOWN = 20  # of the records that were left out, for each reason
CPU_S = 30  # of one row, against a chat template that does not end
MAX_ROWS = 500_000_000
_UNSAID = {"workers", "log_interval", "output_prefix"}  # keys that the output does not depend on


class Made(NamedTuple):
    """What became of a chunk: rows as (JSON, digest), sentences about the others by reason, longest in tokens."""

    read: int
    rows: list[tuple[bytes, bytes]]
    left_out: list[tuple[str, str]]
    longest: tuple[int, int]


# ---- one chunk, in any process


def make_chunk(settings: Settings, scratch: str, name: str, chunk: list[Item]) -> Made:
    """The rows of a chunk of the source `name`."""
    template, tokenizer = _tools(settings.prompt_type, settings.tokenizer_name_or_path, scratch)
    handler, additional = settings.handler, settings.dataset_additional_keys
    source = settings.data_source or settings.handler_name
    read, rows, left_out, longest = 0, [], [], (0, 0)
    for line, record in _records(chunk):
        read, origin = read + 1, f"{name}:{line}"
        try:
            if isinstance(record, ValueError):
                raise record
            values = parse(record) if isinstance(record, bytes) else record
            with _cpu_limit():
                row = make_row(handler, Record(values, handler.fields), template, source, origin, additional)
                tokens = _tokens(tokenizer, row) if tokenizer is not None else (0, 0)
            text = json.dumps(row).encode()
        except (ValueError, RecursionError) as error:
            left_out.append(("bad", f"{origin}: {error or 'nested too deep'}"))
            continue
        if settings.seq_length and sum(tokens) > settings.seq_length:
            left_out.append(("too_long", f"{origin}: {sum(tokens)} tokens; expected at most {settings.seq_length}"))
            continue
        longest = tuple(map(max, longest, tokens))
        prompt = [" ".join(message["content"].split()) for message in row.get("prompt", ())]
        key = json.dumps([prompt, [row[column] for column in handler.columns if column in RESPONSES or not prompt]])
        rows.append((text, hashlib.blake2b(key.encode(), digest_size=16).digest()))
    return Made(read, rows, left_out, longest)


def _records(chunk: list[Item]) -> Iterator[tuple[int, Any]]:
    for line, value in chunk:
        if isinstance(value, bytes | ValueError):
            yield line, value
        else:
            yield from enumerate(value.to_pylist(), line)


@functools.cache
def _tools(prompt_type: str, tokenizer: str | None, scratch: str) -> tuple[Any, Any]:
    """(template, tokenizer) of this process."""
    if tokenizer is None:
        return template_of(prompt_type), None
    from transformers import AutoTokenizer

    is_folder = os.path.isdir(tokenizer)
    cache = None if is_folder else os.path.join(scratch, "tokenizer")
    try:
        found = AutoTokenizer.from_pretrained(tokenizer, cache_dir=cache, local_files_only=is_folder)
    except Exception as error:  # transformers gives many kinds for damaged files
        text = " ".join(f"{type(error).__name__}: {error}".split())
        where = f"tokenizer_name_or_path {tokenizer}"
        raise ConfigError(f"{where}: expected a model folder or an id, no tokenizer can be read: {text:.300}") from None
    if not found.chat_template:
        raise ConfigError(f"tokenizer_name_or_path {tokenizer}: it has no chat template, which verl needs")
    return template_of(prompt_type), found


def _tokens(tokenizer: Any, row: Row) -> tuple[int, int]:
    """(prompt, longest response with its end tokens), as a run counts them (objectives/dataset.py)."""
    if "text" in row:
        return 1, len(tokenizer.encode(row["text"]))
    try:
        prompt = len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True))
    except Exception as error:  # of the template: raise_exception, roles that it does not know
        raise ValueError(f"the tokenizer's chat template: {type(error).__name__}: {error}") from None
    ends = 2 if "chosen" in row else 1
    texts = [row[name] for name in RESPONSES if name in row]
    texts = [text if isinstance(text, list) else [text] for text in texts]
    sizes = [sum(len(tokenizer.encode(part, add_special_tokens=False)) for part in parts) + ends for parts in texts]
    return prompt, max(sizes, default=0)


@contextmanager
def _cpu_limit() -> Iterator[None]:
    """ValueError where the block takes more than CPU_S of CPU time."""

    def end(*_: Any) -> None:
        raise ValueError(f"the row took more than {CPU_S} s: its template does not end")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# ---- all of them


class Store:
    """Rows in a file, found by their number."""

    def __init__(self, path: Path):
        self.file, self.starts, self.digests = path.open("w+b"), array("Q", [0]), bytearray()

    def __len__(self) -> int:
        return len(self.starts) - 1

    def add(self, text: bytes, digest: bytes) -> None:
        """Append a row."""
        if len(self) == MAX_ROWS:
            raise ConfigError(f"input: more than {MAX_ROWS} rows; build it in parts")
        self.file.write(text)
        self.starts.append(self.starts[-1] + len(text))
        self.digests += digest

    def read(self, number: int) -> Row:
        """A row; all are there once the file was flushed."""
        start, stop = self.starts[number], self.starts[number + 1]
        return json.loads(os.pread(self.file.fileno(), stop - start, start))

    def first_of_each(self) -> Any:
        """The numbers, in order, of the rows whose digest no earlier row has."""
        halves = np.frombuffer(self.digests, np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: of equal ones the first comes first
        first = np.ones(len(order), bool)
        first[1:] = (halves[order[1:]] != halves[order[:-1]]).any(1)
        return np.sort(order[first])


def build(settings: Settings, overwrite: bool = False, quiet: bool = False) -> tuple[int, dict[str, Any]]:
    """Write the folder of output_prefix: (0, report), or (1, report) and nothing written (refuse_above).

    ConfigError for wrong use. `quiet`: no progress.
    """
    target, report = Path(settings.output_prefix), {"read": 0}
    report |= {reason: {"rows": 0, "shown": []} for reason in REASONS}
    with whole_folder(target, overwrite) as work:
        sources = list(sources_of(settings.inputs, settings.input_split, work))
        _tools(settings.prompt_type, settings.tokenizer_name_or_path, str(work))  # what is wrong ends the command early
        store = Store(work / "rows")
        _read(settings, sources, work, store, report, quiet)
        numbers = np.arange(len(store))
        if settings.dedupe:
            numbers = store.first_of_each()
            for number in np.setdiff1d(np.arange(len(store)), numbers):
                origin = store.read(number)["extra_info"]["origin"] if report["repeated"]["rows"] < SHOWN else ""
                _leave_out(report["repeated"], origin)
        limits = {"bad": 0.0, "repeated": 1.0, "too_long": 1.0} | settings.refuse_above
        report["refused"] = [why for why in REASONS if report[why]["rows"] > limits[why] * report["read"]]
        if not report["read"]:
            raise ConfigError(f"input {', '.join(settings.inputs)}: expected rows, found none")
        if report["refused"]:
            return 1, report
        order = array("q", numbers.tolist())
        if settings.shuffle:
            Random(settings.seed).shuffle(order)
        _write(settings, store, order, work / "out", report, quiet)
        manifest = {
            "format": "verl_patches data",
            "version": 1,
            "settings": settings.model_dump(exclude=_UNSAID),
            "inputs": [source.facts for source in sources],
            "report": report,
            "files": [file_facts(work / "out" / name) for name in (TRAIN, TEST)],
        }
        (work / "out" / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return 0, {**report, "files": [str(target / name) for name in (TRAIN, TEST)]}


def _leave_out(found: dict[str, Any], sentence: str) -> None:
    found["rows"] += 1
    if len(found["shown"]) < SHOWN:
        found["shown"].append(sentence)


def _read(
    settings: Settings, sources: list[Source], work: Path, store: Store, report: dict[str, Any], quiet: bool
) -> None:
    """All rows to `store`; counts and longest_tokens to `report`."""
    longest = (0, 0)
    chunks = ((source.name, chunk) for source in sources for chunk in chunks_of(source))
    with _progress(settings, quiet, "read", None) as step:
        for made in _in_order(settings, str(work), chunks):
            report["read"] += made.read
            for row in made.rows:
                store.add(*row)
            for reason, sentence in made.left_out:
                _leave_out(report[reason], sentence)
            longest = tuple(map(max, longest, made.longest))
            step(made.read)
    store.file.flush()
    if settings.tokenizer_name_or_path:
        report["longest_tokens"] = {"prompt": longest[0], "response": longest[1]}


def _in_order(settings: Settings, scratch: str, chunks: Iterable[tuple[str, list[Item]]]) -> Iterator[Made]:
    """What each chunk becomes, in their order; at most two for each worker are held."""
    make = functools.partial(make_chunk, settings, scratch)
    if settings.workers == 1:
        yield from (make(*chunk) for chunk in chunks)
        return
    begun: deque[Any] = deque()
    try:
        with ProcessPoolExecutor(settings.workers, get_context("spawn"), die_with_parent) as pool:
            for chunk in chunks:
                begun.append(pool.submit(make, *chunk))
                if len(begun) == 2 * settings.workers:
                    yield begun.popleft().result()
            while begun:
                yield begun.popleft().result()
    except BrokenProcessPool as error:
        raise RecipeError(
            "a worker of data build was killed; lower workers, or give the machine more memory"
        ) from error


def _write(settings: Settings, store: Store, order: array, folder: Path, report: dict[str, Any], quiet: bool) -> None:
    """Both files; their rows to `report`."""
    size = settings.test_size
    tests = int(size) if size >= 1 else max(1, round(size * len(order)))
    if tests >= len(order):
        raise ConfigError(f"test_size: {tests} of {len(order)} rows leave none to train on; give a smaller one")
    schema = schema_of(settings.handler.columns, settings.dataset_additional_keys)
    with _progress(settings, quiet, "write", len(order)) as step:
        for name, part in ((TRAIN, order[tests:]), (TEST, order[:tests])):
            rows = (store.read(number) for number in part)
            report[Path(name).stem] = write_rows(folder / name, rows, schema, step)


@contextmanager
def _progress(settings: Settings, quiet: bool, what: str, total: int | None) -> Iterator[Callable[[int], Any]]:
    """A progress bar on stderr: on a terminal twice a second, in a file at every log_interval rows."""
    from tqdm import tqdm

    often = {"mininterval": 0.5} if sys.stderr.isatty() else {"mininterval": 0, "miniters": settings.log_interval}
    with tqdm(total=total, desc=what, unit="row", disable=quiet, **often) as bar:
        yield bar.update
