"""Read rows of json, jsonl, parquet and HF datasets, local or remote, in order, and turn their prompts into tokens.

Rows are (line or number from 1, value), where a value that cannot be read is a ValueError.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import require_whole_folder
from verl_patches.shared_files import file_fault
from verl_patches.step.rows import render_chat
from verl_patches.values import is_secret_value, loading_errors, printable

if TYPE_CHECKING:
    from verl_patches.tools.data.settings import Settings

_BATCH_ROWS = 256
_URL_PATTERN, _DATASET_ID_PATTERN = re.compile("(s3|hf)://."), re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
ENDINGS = (".json", ".jsonl", ".parquet")
Rows = Iterator[tuple[int, Any]]


class Source(NamedTuple):
    """Describe one file or dataset: its name in origins, its rows, and its entry in the manifest."""

    name: str
    rows: Callable[[], Rows]
    facts: dict[str, Any]


def input_sources(settings: Settings, scratch: Path) -> Iterator[Source]:
    """Yield the sources of each input in order; copy remote files to `scratch`; ConfigError for an invalid input."""
    for number, given in enumerate(settings.inputs):
        if is_secret_value(given):
            text = "input: expected an address without credentials, found one with a secret"
            raise ConfigError(f"{text}; pass credentials in environment variables")
        with loading_errors(f"input {given}: expected readable files or a readable dataset"):
            path = Path(given)
            if _URL_PATTERN.match(given):
                yield from map(_file_source, _download(given, scratch / f"input{number}"))
            elif (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
                yield _dataset_source(given, settings.input_split, local=True)
            elif path.is_dir():
                yield from map(_file_source, _readable_files(given, path.iterdir()))
            elif not path.exists() and path.suffix not in ENDINGS and _DATASET_ID_PATTERN.fullmatch(given):
                yield _dataset_source(given, settings.input_split, local=False)
            else:
                yield _file_source(path)


def _readable_files(given: str, files: Iterable[Any]) -> list[Any]:
    """Return the files, sorted, whose names say that they can be read; raise ConfigError without any."""
    found = sorted(file for file in files if Path(file).suffix in ENDINGS)
    if not found:
        raise ConfigError(f"input {given}: expected {', '.join(ENDINGS)} files or a saved HF dataset, found none")
    return found


def _file_source(path: Path) -> Source:
    if not path.is_file() or path.suffix not in ENDINGS:
        found = "a file of another type" if path.is_file() else "no file"
        raise ConfigError(
            f"input {path}: expected a {', '.join(ENDINGS)} file, a folder or a dataset id, found {found}"
        )
    return Source(printable(path.name), lambda: read_rows(path), file_facts(path))


def file_facts(path: Path) -> dict[str, Any]:
    """Return name, bytes and sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _dataset_source(given: str, split: str, local: bool) -> Source:
    from datasets import load_dataset, load_from_disk

    found = load_from_disk(given) if local else load_dataset(given, split=split)
    if isinstance(found, dict):
        if split not in found:
            raise ConfigError(f"input {given}: expected input_split to be {' or '.join(found)}, found {split}")
        found = found[split]
    facts = {"name": given, "split": split, "rows": len(found), "version": str(found.version or "")}

    def rows() -> Rows:
        with loading_errors(f"input {given}: expected readable rows"):
            yield from _numbered_rows(found.with_format("arrow").iter(_BATCH_ROWS))

    return Source(printable(Path(given).name), rows, facts)


def _download(url: str, folder: Path) -> list[Path]:
    """Copy the file of an address, or all readable files of a remote folder, to `folder`; return them in order."""
    import fsspec

    try:
        system, place = fsspec.url_to_fs(url)
    except ImportError as error:
        raise ConfigError(f"input {url}: package s3fs is not installed; pip install s3fs, or copy the files") from error
    places = _readable_files(url, [place] if system.isfile(place) else system.ls(place, detail=False))
    files = [folder / str(number) / Path(name).name for number, name in enumerate(places)]
    system.get(places, [*map(str, files)])
    return files


def read_rows(path: Path) -> Rows:
    """Yield the rows of a .json, .jsonl or .parquet file; raise ConfigError for one that cannot be read."""
    with loading_errors(f"{path}: expected a readable file"):
        if fault := file_fault(path):
            raise ConfigError(f"{path} {fault}")
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif path.suffix == ".json" and not _begins_with_an_object(path):
            yield from _read_json(path)
        else:
            yield from _read_jsonl(path)


def _begins_with_an_object(path: Path) -> bool:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        return next(filter(None, map(str.strip, lines)), "").startswith("{")


def _read_json(path: Path) -> Rows:
    rows = _parse(path.read_bytes())
    if not isinstance(rows, list):
        raise ConfigError(f"{path}: expected a JSON list of objects, found {type(rows).__name__}")
    yield from enumerate(rows, 1)


def _read_jsonl(path: Path) -> Rows:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, _parse(line)
                except ValueError as error:
                    yield number, error


def _parse(text: bytes) -> Any:
    """Return the value of a JSON text; raise ValueError if it is invalid, has NaN, or is nested too deep."""
    try:
        return json.loads(text.decode("utf-8-sig"), parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"invalid JSON: {error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("JSON that is nested too deep") from None


def _refuse_constant(word: str) -> None:
    raise ValueError(f"invalid JSON: {word}")


def _read_parquet(path: Path) -> Rows:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        yield from _numbered_rows(file.iter_batches(_BATCH_ROWS))


def _numbered_rows(batches: Iterable[Any]) -> Rows:
    return enumerate((row for batch in batches for row in batch.to_pylist()), 1)


def read_tokenizer(place: str | Path, trusted: bool, expected: str = "a tokenizer", local: bool = True) -> Any:
    """Return the tokenizer of a model's folder or id; ConfigError without one. `trusted`: whether its code may run."""
    from transformers import AutoTokenizer

    with loading_errors(f"{place}: expected {expected}", str(place)):
        require_whole_folder(Path(place), trusted)
        return AutoTokenizer.from_pretrained(place, local_files_only=local, trust_remote_code=trusted)


def prompt_tokens(tokenizer: Any, prompt: Any) -> list[int]:
    """Return the tokens of a text, or of messages; raise ValueError for anything else."""
    text = prompt if isinstance(prompt, str) else render_chat(tokenizer, prompt)
    text.encode()  # raises UnicodeEncodeError for half a surrogate pair
    with loading_errors("expected text that the tokenizer takes", tokenizer.name_or_path):
        tokens = tokenizer(text, add_special_tokens=isinstance(prompt, str))["input_ids"]
    if not tokens:
        raise ValueError("expected text with at least one token, found none")
    return tokens
