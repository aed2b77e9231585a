"""Inputs of `data build` as records, in order and in bounded memory: json, jsonl, parquet, HF datasets; local or remote.

Items are (line or row, value). JSON is split here and parsed in the workers; a ValueError takes the place of what
cannot be read.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from verl_patches.errors import ConfigError
from verl_patches.values import is_secret_value, printable

if TYPE_CHECKING:
    import pyarrow

MAX_ROW_BYTES = 16 << 20
MAX_GROUP_BYTES = 4 << 30  # of a row group of a parquet file, uncompressed
CHUNK_ROWS, CHUNK_BYTES = 256, 1 << 20  # of one call of a worker; the same whatever their number is
_BLOCK = 1 << 20
_TOO_LARGE = f"a row has more than {MAX_ROW_BYTES >> 20} MiB"
_BLANK = re.compile(r"[ \t\r\n]*")
_URL = re.compile(r"(s3|hf)://.")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
Item = tuple[int, "bytes | ValueError | pyarrow.RecordBatch"]


class Source(NamedTuple):
    """One file or dataset: its name in origins, its items, and what the manifest says of it."""

    name: str
    items: Callable[[], Iterator[Item]]
    facts: dict[str, Any]


def sources_of(inputs: list[str], split: str, scratch: Path) -> Iterator[Source]:
    """The sources of each input, in order; what is downloaded goes to `scratch`. ConfigError for what is none."""
    for number, given in enumerate(inputs):
        if is_secret_value(given):
            raise ConfigError("input: an address holds a secret; credentials are read from the environment alone")
        path = Path(given)
        if _URL.match(given):
            yield from map(_file, _download(given, scratch / f"input{number}"))
        elif path.is_dir() and ((path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists()):
            yield _dataset(given, lambda path=path: _load_folder(path, split))
        elif path.is_dir():
            files = sorted(file for file in path.iterdir() if file.suffix in _READERS and file.is_file())
            if not files:
                raise ConfigError(f"input {given}: expected {', '.join(_READERS)} or a saved HF dataset, found none")
            yield from map(_file, files)
        elif path.suffix not in _READERS and not path.exists() and _ID.fullmatch(given):
            yield _dataset(given, lambda given=given: _load_id(given, split, scratch / "datasets"))
        else:
            yield _file(path)


def parse(text: bytes) -> Any:
    """The value of a JSON text; ValueError for what is none, for NaN, and for one that is nested too deep."""
    try:
        return json.loads(text.decode(), parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} in column {error.colno}") from None
    except RecursionError:
        raise ValueError("nested too deep") from None


def _refuse(word: str) -> None:
    raise ValueError(f"expected JSON, found {word}")


def _file(path: Path) -> Source:
    if not path.is_file():
        raise ConfigError(f"input {path}: no such file; expected {', '.join(_READERS)}, a folder of them or an id")
    if path.suffix not in _READERS:
        raise ConfigError(f"input {path}: expected a file ending in {', '.join(_READERS)}")
    return Source(printable(path.name), lambda: _READERS[path.suffix](path), file_facts(path))


def file_facts(path: Path) -> dict[str, Any]:
    """Name, bytes and sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


class _Text:
    """Text of a file of which a few blocks are held: `text[at:]` was not read yet; `text[:counted]` ends in `line`."""

    def __init__(self, file: TextIO):
        self.file, self.text, self.at, self.line, self.counted = file, "", 0, 1, 0
        self._scan = json.JSONDecoder().raw_decode

    def here(self, at: int) -> int:
        """The line of a place."""
        self.line, self.counted = self.line + self.text.count("\n", self.counted, at), at
        return self.line

    def more(self, size: int = _BLOCK) -> bool:
        """Read on; whether there was more."""
        if block := self.file.read(size):
            self.here(self.at)
            self.text, self.at, self.counted = self.text[self.at :] + block, 0, 0
        return block != ""

    def peek(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            self.at = _BLANK.match(self.text, self.at).end()
            if self.at < len(self.text) or not self.more():
                return self.text[self.at : self.at + 1]

    def value(self) -> str:
        """The text of the value that begins here."""
        size = _BLOCK
        while True:
            try:
                _, stop = self._scan(self.text, self.at)
                if stop < len(self.text) or not self.more(size):
                    break
            except json.JSONDecodeError:
                if len(self.text) - self.at > MAX_ROW_BYTES or not self.more(size):
                    raise
            size *= 2
        if stop - self.at > MAX_ROW_BYTES:
            raise ValueError(_TOO_LARGE)
        found, self.at = self.text[self.at : stop], stop
        return found


def _json(path: Path) -> Iterator[Item]:
    """The rows of a JSON list; those of JSON lines under the wrong ending."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        text = _Text(file)
        try:
            if (mark := text.peek()) == "{":
                yield from _jsonl(path)
                return
            if mark != "[":
                raise json.JSONDecodeError("expected a JSON list of objects", text.text, text.at)
            text.at += 1
            mark = text.peek() if text.peek() == "]" else ","
            while mark == ",":
                text.peek()
                line = text.here(text.at)
                yield line, text.value().encode()
                if (mark := text.peek()) not in (",", "]"):
                    raise json.JSONDecodeError('expected "," and a row, or "]"', text.text, text.at)
                text.at += 1
            text.at += text.peek() == "]"
            if text.peek():
                raise json.JSONDecodeError("more text after the list", text.text, text.at)
        except json.JSONDecodeError as error:
            yield text.here(error.pos), ValueError(f"not JSON: {error.msg}; reading stopped there")
        except RecursionError:
            yield text.here(text.at), ValueError("nested too deep; reading stopped there")
        except ValueError as error:  # not UTF-8, an integer of too many digits, a large row
            yield text.here(text.at), ValueError(f"cannot be read: {error}; reading stopped there")


def _jsonl(path: Path) -> Iterator[Item]:
    with path.open("rb") as file:
        line = 0
        while text := file.readline(MAX_ROW_BYTES + 1):
            line += 1
            if len(text) > MAX_ROW_BYTES:
                while text and not text.endswith(b"\n"):
                    text = file.readline(_BLOCK)
                yield line, ValueError(_TOO_LARGE)
            elif text := text.removeprefix(codecs.BOM_UTF8).strip():
                yield line, text


def _parquet(path: Path) -> Iterator[Item]:
    from pyarrow import ArrowException, parquet

    try:
        with parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
            if most := max((group.total_byte_size for group in groups), default=0) > MAX_GROUP_BYTES:
                raise ValueError(
                    f"a row group has {most} bytes; expected at most {MAX_GROUP_BYTES}: write smaller ones"
                )
            yield from _numbered(file.iter_batches(CHUNK_ROWS))
    except (ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise ConfigError(f"{path}: expected a parquet file, found one that cannot be read: {error}") from error


def _numbered(batches: Iterable[Any]) -> Iterator[Item]:
    row = 1
    for batch in batches:
        yield row, batch
        row += batch.num_rows


_READERS: dict[str, Callable[[Path], Iterator[Item]]] = {".json": _json, ".jsonl": _jsonl, ".parquet": _parquet}


def _dataset(given: str, load: Callable[[], Any]) -> Source:
    """A dataset of the library `datasets`, opened here so that what is wrong with it ends the command early."""
    try:
        found = load()
    except ConfigError:
        raise
    except Exception as error:  # the library and the hub's client give many kinds
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"input {given}: no dataset can be read there: {text:.300}") from error
    table = found.with_format("arrow")
    facts = {"name": given, "rows": len(found), "revision": str(found.version or "")}
    return Source(printable(Path(given).name), lambda: _numbered(table.iter(CHUNK_ROWS)), facts)


def _load_folder(path: Path, split: str) -> Any:
    from datasets import DatasetDict, load_from_disk

    found = load_from_disk(str(path))
    if not isinstance(found, DatasetDict):
        return found
    if split not in found:
        raise ConfigError(f"input {path}: no split {split}; expected input_split to be one of {', '.join(found)}")
    return found[split]


def _load_id(given: str, split: str, scratch: Path) -> Any:
    from datasets import DownloadConfig, load_dataset

    where = DownloadConfig(cache_dir=scratch / "downloads")
    return load_dataset(given, split=split, cache_dir=str(scratch), download_config=where)


def _download(url: str, folder: Path) -> list[Path]:
    """The files of an address, copied to `folder`, in order; a folder's are all that can be read."""
    import fsspec

    try:
        system, place = fsspec.url_to_fs(url)
        places = [place] if system.isfile(place) else [name for name in system.ls(place, detail=False)]
        places = sorted(name for name in places if Path(name).suffix in _READERS)
        if not places:
            raise FileNotFoundError(f"no {', '.join(_READERS)} there")
        files = [folder / f"{number:05d}" / Path(name).name for number, name in enumerate(places)]
        for name, file in zip(places, files, strict=True):
            file.parent.mkdir(parents=True)
            system.get_file(name, str(file))
    except ImportError as error:
        package = {"s3": "s3fs", "hf": "huggingface_hub"}[url.partition(":")[0]]
        raise ConfigError(
            f"input {url}: {package} is not installed: pip install {package}, or copy the files"
        ) from error
    except Exception as error:  # each store has errors of its own
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"input {url}: cannot be read: {text:.300}") from error
    return files


def chunks_of(source: Source) -> Iterator[list[Item]]:
    """The items of a source in groups of CHUNK_ROWS or CHUNK_BYTES; a batch of rows is a group of its own."""
    group: list[Item] = []
    size = 0
    for item in source.items():
        if not isinstance(item[1], bytes | ValueError):
            yield [item]
            continue
        group.append(item)
        size += len(item[1]) if isinstance(item[1], bytes) else 0
        if len(group) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
