"""`data build`: read, make rows, leave out, shuffle, split, write. The same input and keys give the same bytes.

Rows go as JSON to a scratch file of SQLite, in the order of the input whatever process has made them; their order is
held, about 10 bytes a row. The parquet files are then written row by row.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sqlite3
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from verl_patches.data.handlers import RESPONSES, Record, Row, digest_of, make_row, schema_of
from verl_patches.data.output import MANIFEST, TEST, TRAIN, whole_folder, write_rows
from verl_patches.data.settings import REASONS, Settings
from verl_patches.data.sources import Source, file_facts, prompt_tokens, read_tokenizer, sources_of
from verl_patches.data.templates import template_of
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.processes import die_with_parent

SHOWN, PLACES = 20, 3  # sentences of a reason in the report, and places of each
MAX_GOLD_WORDS = 4  # the reward compares what has more, like any phrase, as text alone
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
CHUNK_ROWS = 64  # of one call of a worker
CACHE_KIB = 16 << 10  # of the scratch file
_UNSAID = {"workers", "log_interval", "output_prefix"}  # keys that the output does not depend on
Digests = tuple[int, int]  # of a row's prompt, and of all that makes two rows repeated ones
Noted = tuple[str, str, str]  # reason, origin, sentence
Progress = Callable[[str, int | None], AbstractContextManager[Callable[[int], Any]]]
Made = tuple[int, list[tuple[bytes, Digests, str]], list[Noted], tuple[int, int]]


# ---- a chunk, in any process


def make_chunk(settings: Settings, name: str, chunk: list[tuple[int, Any]]) -> Made:
    """(records, rows as (JSON, digests, origin), what the report says of others, most tokens) of source `name`."""
    template, tokenizer = _tools(settings.prompt_type, settings.tokenizer_name_or_path)
    handler, additional = settings.handler, settings.dataset_additional_keys
    rows, noted, longest = [], [], (0, 0)
    for line, record in chunk:
        origin = f"{name}:{line}"
        try:
            if isinstance(record, ValueError):
                raise record
            values = Record(record, handler.fields)
            row = make_row(handler, values, template, settings.data_source or settings.handler_name, origin, additional)
            tokens = _tokens(tokenizer, row) if tokenizer else (0, 0)
            text = json.dumps(row).encode()
        except (ValueError, RecursionError) as error:
            noted.append(("bad", origin, str(error)))
            continue
        except RecipeError as error:
            raise RecipeError(f"{origin}: {error}") from None
        if settings.seq_length and sum(tokens) > settings.seq_length:
            noted.append(("too_long", origin, f"more than {settings.seq_length} tokens"))
            continue
        if handler.ability == "math" and len(_WORD.findall(row["reward_model"]["ground_truth"])) > MAX_GOLD_WORDS:
            noted.append(("sentences", origin, "the gold answer is a sentence, which the reward compares as text"))
        longest = tuple(map(max, longest, tokens))
        prompt = [message["content"].split() for message in row["prompt"]] if "prompt" in row else row["text"]
        fixed = [row[column] for column in handler.columns]
        rows.append((text, (digest_of(prompt), digest_of([prompt, fixed])), origin))
    return len(chunk), rows, noted, longest


@functools.cache
def _tools(prompt_type: str, tokenizer: str | None) -> tuple[Any, Any]:
    """(template, tokenizer) of this process."""
    if tokenizer is None:
        return template_of(prompt_type), None
    expected = "tokenizer_name_or_path to be a model folder that is there, or an id"
    found = read_tokenizer(tokenizer, expected, local=os.path.isdir(tokenizer))
    if not found.chat_template:
        raise ConfigError(f"tokenizer_name_or_path {tokenizer}: it has no chat template, which verl needs")
    return template_of(prompt_type), found


def _tokens(tokenizer: Any, row: Row) -> tuple[int, int]:
    """(prompt, longest response with its end tokens), as a run counts them (objectives/dataset.py)."""
    if "text" in row:
        return 1, len(tokenizer.encode(row["text"]))
    prompt = len(prompt_tokens(tokenizer, row["prompt"]))
    texts = [row[name] if name == "steps" else [row[name]] for name in RESPONSES if name in row]
    sizes = [sum(len(tokenizer.encode(part, add_special_tokens=False)) for part in parts) for parts in texts]
    return prompt, max(sizes) + len(sizes) if sizes else 0  # of a pair, a reward model has two end tokens


# ---- all of them


@contextmanager
def _table(path: Path, dedupe: bool) -> Iterator[sqlite3.Connection]:
    """A new file of SQLite with `rows`, where `dedupe` allows one of each digest, and `tests`, prompts."""
    with closing(sqlite3.connect(path, isolation_level=None)) as table:
        table.executescript(
            f"""PRAGMA journal_mode = off; PRAGMA temp_store = memory; PRAGMA cache_size = -{CACHE_KIB}; BEGIN;
            CREATE TABLE rows (number INTEGER PRIMARY KEY, digest INTEGER {"UNIQUE" if dedupe else ""}, prompt, text);
            CREATE TABLE tests (prompt INTEGER PRIMARY KEY);"""
        )
        yield table


def _split(table: sqlite3.Connection, order: array, tests: int) -> list[array]:
    """[train, test] of row numbers in an order; test has its first `tests`, and all others with their prompts."""
    first = ((number,) for number in order[:tests])
    table.executemany("INSERT OR IGNORE INTO tests SELECT prompt FROM rows WHERE number = ?", first)
    sides = [array("I"), array("I")]
    for number in order:
        ((side,),) = table.execute("SELECT prompt IN tests FROM rows WHERE number = ?", (number,))
        sides[side].append(number)
    return sides


def build(settings: Settings, overwrite: bool, progress: Progress) -> tuple[int, dict[str, Any]]:
    """Write the folder of output_prefix: (0, report), or (1, report) and nothing written (refuse_above).

    ConfigError for wrong use. `progress(what, rows or None)` gives what is called with each count of rows.
    """
    report: dict[str, Any] = {"read": 0, **{reason: {"rows": 0, "shown": {}} for reason in REASONS}}

    def note(reason: str, origin: str, sentence: str) -> None:
        found = report[reason]
        found["rows"] += 1
        if sentence in found["shown"] or len(found["shown"]) < SHOWN:
            same = found["shown"].setdefault(sentence, {"rows": 0, "places": []})
            same["rows"] += 1
            same["places"] += [origin] * (len(same["places"]) < PLACES)

    target, longest = Path(settings.output_prefix), (0, 0)
    with whole_folder(target, overwrite) as work, _table(work / "rows", settings.dedupe) as table:
        os.environ["HF_HOME"] = str((work / "hub").absolute())  # of this process and its workers, before HF's imports
        out, sources = work / "out", list(sources_of(settings, work))
        _tools(settings.prompt_type, settings.tokenizer_name_or_path)  # what is wrong ends the command here
        with progress("read", None) as step:
            for count, made, noted, most in _in_order(settings, _chunks(sources)):
                report["read"] += count
                longest = tuple(map(max, longest, most))
                for one in noted:
                    note(*one)
                for text, (prompt, digest), origin in made:
                    new = "INSERT OR IGNORE INTO rows (digest, prompt, text) VALUES (?, ?, ?)"
                    if not table.execute(new, (digest, prompt, text)).rowcount:
                        note("repeated", origin, "as one before it")
                step(count)
        if not report["read"]:
            raise ConfigError(f"input {', '.join(settings.inputs)}: expected rows, found none")
        limits = REASONS | settings.refuse_above
        report["refused"] = [why for why in REASONS if report[why]["rows"] > limits[why] * report["read"]]
        if report["refused"]:
            return 1, report
        if settings.tokenizer_name_or_path:
            report["longest_tokens"] = {"prompt": longest[0], "response": longest[1]}
        ((size,),) = table.execute("SELECT count(*) FROM rows")
        if size < 2:
            out_of = ", ".join(f"{n} {why}" for why in ("bad", "repeated", "too_long") if (n := report[why]["rows"]))
            raise ConfigError(f"{size} of {report['read']} rows are left ({out_of or 'no more'}); expected 2 or more")
        order = array("I", range(1, size + 1))
        if settings.shuffle:
            Random(settings.seed).shuffle(order)
        tests = settings.test_size if settings.test_size >= 1 else max(1, round(settings.test_size * size))
        train, test = _split(table, order, tests)
        if not train:
            found = f"test_size is {settings.test_size}: {len(test)} of {size} rows"
            raise ConfigError(f"{found} leave none to train on; give a smaller one")
        schema = schema_of(settings.handler.columns, settings.dataset_additional_keys)

        def text_of(number: int) -> bytes:
            return table.execute("SELECT text FROM rows WHERE number = ?", (number,)).fetchone()[0]

        with progress("write", size) as step:
            for name, part in ((TRAIN, train), (TEST, test)):
                report[Path(name).stem] = len(part)
                write_rows(out / name, map(text_of, part), schema, step)
        manifest = {"format": "verl_patches data", "version": 1, "settings": settings.model_dump(exclude=_UNSAID)}
        manifest |= {"inputs": [source.facts for source in sources], "report": report}
        manifest["files"] = [file_facts(out / name) for name in (TRAIN, TEST)]
        (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return 0, {**report, "files": [str(target / name) for name in (TRAIN, TEST)]}


def _chunks(sources: list[Source]) -> Iterator[tuple[str, list[tuple[int, Any]]]]:
    for source in sources:
        rows = source.rows()
        while chunk := list(islice(rows, CHUNK_ROWS)):
            yield source.name, chunk


def _in_order(settings: Settings, chunks: Iterable[tuple[str, list[tuple[int, Any]]]]) -> Iterator[Made]:
    """What each chunk becomes, in their order; at most two for each worker are held."""
    make = functools.partial(make_chunk, settings)
    if settings.workers == 1:
        yield from (make(*chunk) for chunk in chunks)
        return
    begun: deque[Any] = deque()
    try:
        with ProcessPoolExecutor(settings.workers, get_context("spawn"), _start, (os.getpid(),)) as pool:
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


def _start(parent: int) -> None:
    """In a new worker."""
    die_with_parent()
    if os.getppid() != parent:  # which died before that
        os._exit(1)
