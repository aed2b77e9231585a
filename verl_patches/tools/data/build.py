"""Build data (`data build`): read, make rows, leave out, shuffle, split, write. Equal input and keys give equal bytes.

The rows (as JSON) are an Arrow file of package `datasets`, in the order of the input, in a scratch folder beside the
output; memory holds only the number and the digests of each row.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.processes import END_SIGNALS, die_with_parent
from verl_patches.step.objectives.chat import row_tokens
from verl_patches.tools.data.handlers import (
    CONVERSATION_COLUMNS,
    RESPONSE_KEYS,
    Record,
    conversation_row,
    json_digest,
    make_row,
    parquet_schema,
    read_template,
)
from verl_patches.tools.data.output import TEST, TRAIN, new_folder, write_manifest, write_rows
from verl_patches.tools.data.settings import REASON_LIMITS, Settings
from verl_patches.tools.data.sources import Source, file_facts, input_sources, read_tokenizer
from verl_patches.values import printable

if TYPE_CHECKING:
    from datasets import Dataset

MAX_SHOWN = 20  # most rows of a reason in the report
MAX_GOLD_WORDS = 4  # the reward compares longer gold answers, like any phrase, only as text
_WORD_PATTERN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_BATCH_ROWS = 256
_UNRECORDED_KEYS = {"workers", "log_interval", "output_prefix"}  # keys that the output does not depend on
# the result of a record: the row as JSON unless it is left out; a reason of REASON_LIMITS and its sentence; digests of
# its prompt, and of all by which rows are compared; numbers of tokens of its prompt and of its longest response
RESULT_COLUMNS = {"origin": "string", "text": "string", "reason": "string", "sentence": "string"}
RESULT_COLUMNS |= dict.fromkeys(("prompt", "digest", "prompt_tokens", "response_tokens"), "int64")
RESULT_COLUMNS |= {"conversation": "bool"}  # whether the row has CONVERSATION_COLUMNS


def _make_results(batch: Mapping[str, list[Any]], settings: Settings) -> dict[str, list[Any]]:
    """Return the RESULT_COLUMNS of a batch of records; this runs in any process."""
    pairs = zip(batch["origin"], map(pickle.loads, batch["record"]), strict=True)
    made = [make_result(settings, origin, record) for origin, record in pairs]
    return {name: [row[name] for row in made] for name in RESULT_COLUMNS}


def make_result(settings: Settings, origin: str, record: Any) -> dict[str, Any]:
    """Return the RESULT_COLUMNS of one record."""
    template, tokenizer = _template_and_tokenizer(*settings.tokenizer_choice)
    handler, additional = settings.handler, settings.dataset_additional_keys
    made: dict[str, Any] = {**dict.fromkeys(RESULT_COLUMNS), "origin": origin}
    try:
        if isinstance(record, ValueError):
            raise record
        values = Record(record, handler.fields)
        row = make_row(handler, values, template, settings.data_source or settings.handler_name, origin, additional)
        tokens = _row_tokens(tokenizer, row) if tokenizer else {"prompt": []}
        text = json.dumps(row)
    except (ValueError, RecursionError) as error:
        return {**made, "reason": "bad", "sentence": printable(str(error))}
    prompt_size, *sizes = map(len, tokens.values())
    response_size = max(sizes) + len(sizes) - 1 if sizes else 0  # algo=rm adds an end token to both of a pair
    if settings.seq_length and prompt_size + response_size > settings.seq_length:
        return {**made, "reason": "too_long", "sentence": f"more than {settings.seq_length} tokens"}
    if handler.ability == "math" and len(_WORD_PATTERN.findall(row["reward_model"]["ground_truth"])) > MAX_GOLD_WORDS:
        sentence = "the gold answer is a sentence, which the reward compares as text"
        made |= {"reason": "sentences", "sentence": sentence}
    if "text" in row:
        prompt = row["text"]
    else:
        prompt = [[(one.pop("content") or "").split(), *one.values()] for one in map(dict, row["prompt"])]
    fixed = [row[column] for column in handler.columns]
    made |= {"text": text, "conversation": "tools" in row, "prompt": json_digest(prompt)}
    made |= {"digest": json_digest([prompt, fixed, row.get("tools")])}
    return {**made, "prompt_tokens": prompt_size, "response_tokens": response_size}


@functools.cache
def _template_and_tokenizer(prompt_type: str, tokenizer: str | None, trusted: bool) -> tuple[Any, Any]:
    """Return (template, tokenizer), made once in each process."""
    if tokenizer is None:
        return read_template(prompt_type), None
    expected = "tokenizer_name_or_path to be an existing model folder or a Hugging Face id"
    found = read_tokenizer(tokenizer, trusted, expected, local=os.path.isdir(tokenizer))
    if not found.chat_template:
        where = f"tokenizer_name_or_path {tokenizer}"
        raise ConfigError(f"{where}: expected a chat template, which verl needs, found none; give another tokenizer")
    return read_template(prompt_type), found


def _row_tokens(tokenizer: Any, row: dict[str, Any]) -> dict[str, list[int]]:
    """Return the tokens of the prompt, then of each response, as they are in a run."""
    prompt, responses, _ = row_tokens(tokenizer, conversation_row(row) if "tools" in row else row)
    return {"prompt": prompt, **responses}


def _example(tokenizer: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Return the prompt and the responses of a row: with a tokenizer the text that is trained, else the columns."""
    if tokenizer:
        return {name: tokenizer.decode(ids) for name, ids in _row_tokens(tokenizer, row).items()}
    return {name: row[name] for name in ("prompt", "text", *RESPONSE_KEYS, "tools") if name in row}


def _records(sources: Sequence[Source]) -> Iterator[dict[str, Any]]:
    """Yield each record with its origin; a record that cannot be read is an error, and not every one is JSON."""
    for source in sources:
        for line, record in source.rows():
            yield {"origin": f"{source.name}:{line}", "record": pickle.dumps(record)}


def _make_dataset(settings: Settings, sources: Sequence[Source], scratch: Path) -> Dataset:
    """Return the dataset of RESULT_COLUMNS, with a row for each record; raise ConfigError if there is none."""
    from datasets import Dataset, Features, Value
    from datasets.exceptions import DatasetGenerationError
    from multiprocess.util import register_after_fork

    if all(next(source.rows(), None) is None for source in sources):  # otherwise datasets raises an error of its own
        raise ConfigError(f"input {', '.join(settings.inputs)}: expected rows, found none")
    features = Features({"origin": Value("string"), "record": Value("binary")})
    cache = {"cache_dir": str(scratch / "rows"), "gen_kwargs": {"sources": tuple(sources)}}
    try:
        given = Dataset.from_generator(_records, features, **cache)
    except DatasetGenerationError as error:
        raise error.__cause__ or error from None
    register_after_fork(given, functools.partial(_prepare_worker, threading.get_ident()))  # as long as `given` lives
    try:
        return given.map(
            _make_results,
            batched=True,
            batch_size=_BATCH_ROWS,
            remove_columns=["record"],
            features=Features({name: Value(kind) for name, kind in RESULT_COLUMNS.items()}),
            fn_kwargs={"settings": settings},
            num_proc=settings.workers if settings.workers > 1 else None,
            new_fingerprint="rows",
            desc="Making rows",
        )
    except Exception as error:
        if isinstance(error.__context__, SystemExit | KeyboardInterrupt):  # datasets raises its own error in its place
            raise error.__context__ from None
        if "abruptly died" in str(error) or isinstance(error, EOFError | ConnectionError):
            raise RecipeError(f"workers={settings.workers}: one was killed; lower workers, or add memory") from error
        raise


def _prepare_worker(caller: int, _: object) -> None:
    """Let a process of `datasets` end with thread `caller` of this command, and by no signal of a terminal."""
    os.setsid()
    if threading.get_ident() == caller:  # the thread that replaces a killed worker ends before it, and waits for it
        die_with_parent()
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _read_columns(made: Dataset, *names: str) -> Iterator[dict[str, Any]]:
    """Yield some columns of each row."""
    for batch in made.select_columns([*names]).with_format("arrow").iter(_BATCH_ROWS):
        yield from batch.to_pylist()


def _filter_rows(made: Dataset, dedupe: bool) -> tuple[dict[str, Any], list[tuple[int, int]], dict[str, int]]:
    """Return the report, (number, digest of the prompt) of each row that is kept, and the most tokens of a row."""
    report: dict[str, Any] = {"read": len(made), **{reason: {"rows": 0, "shown": []} for reason in REASON_LIMITS}}
    kept, seen, longest = [], set(), {"prompt": 0, "response": 0}

    def count_reason(reason: str, origin: str, sentence: str) -> None:
        report[reason]["rows"] += 1
        if len(report[reason]["shown"]) < MAX_SHOWN:
            report[reason]["shown"].append(f"{origin}: {sentence}")

    for number, row in enumerate(_read_columns(made, *(name for name in RESULT_COLUMNS if name != "text"))):
        if row["reason"]:
            count_reason(row["reason"], row["origin"], row["sentence"])
        if row["digest"] is None:
            continue
        longest = {name: max(most, row[f"{name}_tokens"]) for name, most in longest.items()}
        if dedupe and row["digest"] in seen:
            count_reason("repeated", row["origin"], "repeats an earlier row")
        else:
            kept.append((number, row["prompt"]))
        seen.add(row["digest"])
    return report, kept, longest


def _split_rows(settings: Settings, kept: list[tuple[int, int]], report: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return {file: row numbers} in their order; test has the first rows, and all others with the same prompts."""
    size = len(kept)
    if size < 2:
        counts = {reason: report[reason]["rows"] for reason in ("bad", "repeated", "too_long")}
        left_out = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count) or "none"
        found = f"{size} of {report['read']} (left out: {left_out})"
        raise ConfigError(f"input: expected 2 or more rows to train and test with, found {found}; give more data")
    if settings.shuffle:
        Random(settings.seed).shuffle(kept)
    count = int(settings.test_size) if settings.test_size >= 1 else max(1, round(settings.test_size * size))
    prompts = {prompt for _, prompt in kept[:count]}
    test = [number for number, prompt in kept if prompt in prompts]
    train = [number for number, prompt in kept if prompt not in prompts]
    if not train:
        found = f"{len(test)} of {size} rows, all with a prompt of the test rows; none is left to train on"
        raise ConfigError(f"test_size is {settings.test_size}: it takes {found}; lower test_size")
    return {TRAIN: train, TEST: test}


def build_data(settings: Settings) -> tuple[int, dict[str, Any]]:
    """Write the folder of output_prefix and return (0, report); above a limit of refuse_above return (1, report) only.

    Raise ConfigError for wrong use. Progress bars go to stderr.
    """
    target = Path(settings.output_prefix)
    with new_folder(target) as work:
        os.environ["HF_HOME"] = str((work / "hub").absolute())  # also for workers; set before HF's imports
        sources = list(input_sources(settings, work))
        _template_and_tokenizer(*settings.tokenizer_choice)  # faults end the command here
        made = _make_dataset(settings, sources, work)
        report, kept, longest = _filter_rows(made, settings.dedupe)
        limits = REASON_LIMITS | settings.refuse_above
        report["refused"] = [why for why in REASON_LIMITS if report[why]["rows"] > limits[why] * report["read"]]
        if report["refused"]:
            return 1, report
        if settings.tokenizer_name_or_path:
            report["longest_tokens"] = longest
        conversations = any(row["conversation"] for row in _read_columns(made, "conversation"))
        columns = CONVERSATION_COLUMNS if conversations else settings.handler.columns
        schema = parquet_schema(columns, settings.dataset_additional_keys)
        parts = _split_rows(settings, kept, report)
        for name, numbers in parts.items():
            report[Path(name).stem] = len(numbers)
            rows = tqdm(_read_columns(made.select(numbers), "text"), f"Writing {name}", len(numbers), unit=" rows")
            write_rows(work / "out" / name, (json.loads(row["text"]) for row in rows), schema)
        facts = {"settings": settings.model_dump(exclude=_UNRECORDED_KEYS), "inputs": [each.facts for each in sources]}
        files = [file_facts(work / "out" / name) for name in (TRAIN, TEST)]
        write_manifest(work / "out", **facts, report=report, files=files)
        (first,) = _read_columns(made.select(parts[TRAIN][:1]), "text")
        tokenizer = _template_and_tokenizer(*settings.tokenizer_choice)[1]
        report["example"] = _example(tokenizer, json.loads(first["text"]))
    return 0, {**report, "files": [str(target / name) for name in (TRAIN, TEST)]}
