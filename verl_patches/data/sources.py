"""Inputs of `data build`, in order and in bounded memory: json, jsonl, parquet and HF datasets, local or remote.

Items are (line or row, value). JSON is cut into its rows here and parsed where rows are made; a ValueError takes the
place of what cannot be read.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from verl_patches.errors import ConfigError
from verl_patches.values import is_secret_value, printable

if TYPE_CHECKING:
    import pyarrow

    from verl_patches.data.settings import Settings

MAX_ROW_BYTES = 16 << 20
MAX_GROUP_BYTES = 4 << 30  # of a row group of a parquet file, uncompressed
CHUNK_ROWS, CHUNK_BYTES = 256, 1 << 20  # of one call of a worker; the same whatever their number is
_BLOCK = 1 << 20
_TOO_LARGE = f"a row has more than {MAX_ROW_BYTES >> 20} MiB"
_ENDS = {*" \t\r\n,]"}  # of a value in a list
_BLANK = re.compile(r"[ \t\r\n]*")
_URL, _ID = re.compile("(s3|hf)://."), re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_PACKAGES = {"s3": "s3fs", "hf": "huggingface_hub"}
Item = tuple[int, "bytes | ValueError | pyarrow.Table | pyarrow.RecordBatch"]


class Source(NamedTuple):
    """One file or dataset: its name in origins, its items, and what the manifest says of it."""

    name: str
    items: Callable[[], Iterator[Item]]
    facts: dict[str, Any]


@contextmanager
def load(expected: str) -> Iterator[None]:
    """ConfigError, "EXPECTED; found ...", for whatever error a library has with what a user named."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # transformers, datasets and each store have their own
        text = printable(" ".join(f"{type(error).__name__}: {error}".split()))
        raise ConfigError(f"{expected}; found {text:.300}") from error


def sources_of(settings: Settings, scratch: Path) -> Iterator[Source]:
    """The sources of each input, in order; downloads go to the folder `scratch`. ConfigError for what is none."""
    for number, given in enumerate(settings.inputs):
        path, split = Path(given), settings.input_split
        if is_secret_value(given):
            raise ConfigError("input: an address holds a secret; credentials are read from the environment alone")
        if _URL.match(given):
            yield from map(_file, _download(given, scratch / f"input{number}"))
        elif (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            yield _dataset(given, split, scratch, local=True)
        elif path.is_dir():
            yield from map(_file, _readable(given, path.iterdir()))
        elif not path.exists() and path.suffix not in _READERS and _ID.fullmatch(given):
            yield _dataset(given, split, scratch, local=False)
        else:
            yield _file(path)


def _readable(given: str, files: Iterable[Any]) -> list[Any]:
    """The files, sorted, whose names say that they can be read; ConfigError where there are none."""
    if not (found := sorted(file for file in files if Path(file).suffix in _READERS)):
        raise ConfigError(f"input {given}: expected {', '.join(_READERS)} files or a saved HF dataset, found none")
    return found


def _file(path: Path) -> Source:
    if not path.is_file() or path.suffix not in _READERS:
        found = "another file" if path.is_file() else "no file"
        raise ConfigError(f"input {path}: expected {', '.join(_READERS)}, a folder or a dataset's id, found {found}")
    return Source(printable(path.name), lambda: _READERS[path.suffix](path), file_facts(path))


def file_facts(path: Path) -> dict[str, Any]:
    """Name, bytes and sha256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _dataset(given: str, split: str, scratch: Path, local: bool) -> Source:
    with load(f"input {given}: expected a dataset that can be read"):
        from datasets import DownloadConfig, load_dataset, load_from_disk

        if local:
            found = load_from_disk(given)
            if isinstance(found, dict) and split not in found:
                raise ConfigError(f"input {given}: expected input_split to be {' or '.join(found)}, found {split}")
            found = found[split] if isinstance(found, dict) else found
        else:
            downloads = DownloadConfig(cache_dir=scratch / "downloads")
            found = load_dataset(given, split=split, cache_dir=str(scratch), download_config=downloads)
    facts = {"name": given, "split": split, "rows": len(found), "version": str(found.version or "")}
    table = found.with_format("arrow")
    return Source(printable(Path(given).name), lambda: _numbered(table.iter(CHUNK_ROWS)), facts)


def _download(url: str, folder: Path) -> list[Path]:
    """The files of an address, copied to `folder` in order; of a folder all that can be read."""
    package = _PACKAGES[url.partition(":")[0]]
    with load(f"input {url}: expected files that can be read with this environment's credentials"):
        import fsspec

        try:
            system, place = fsspec.url_to_fs(url)
        except ImportError as error:
            fault = f"{package} is not installed: pip install {package}, or copy the files"
            raise ConfigError(f"input {url}: {fault}") from error
        places = _readable(url, [place] if system.isfile(place) else system.ls(place, detail=False))
        files = [folder / str(number) / Path(name).name for number, name in enumerate(places)]
        for name, file in zip(places, files, strict=True):
            file.parent.mkdir(parents=True)
            system.get_file(name, str(file))
    return files


def parse(text: bytes) -> Any:
    """The value of a JSON text; ValueError for what is none, for NaN, and for one that is nested too deep."""
    try:
        return json.loads(text.decode(), parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} in column {error.colno}") from None
    except RecursionError:
        raise ValueError("not read: nested too deep") from None


def _refuse(word: str) -> None:
    raise ValueError(f"not JSON: {word}")


class _Text:
    """Text of a file of which a few blocks are held: `text[at:]` was not read yet; `text[:counted]` ends in `line`."""

    def __init__(self, file: TextIO):
        self.file, self.text, self.at, self.line, self.counted = file, "", 0, 1, 0

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

    def take(self, marks: str, expected: str) -> str:
        """The next character that is no blank, which is one of `marks`."""
        if (mark := self.peek()) == "" or mark not in marks:
            raise json.JSONDecodeError(f"expected {expected}", self.text, self.at)
        self.at += 1
        return mark

    def value(self) -> str:
        """The text of the value that begins here."""
        size = _BLOCK
        while True:
            fault = None
            try:
                _, stop = json.JSONDecoder().raw_decode(self.text, self.at)
                if self.text[stop : stop + 1] in _ENDS:
                    break
            except json.JSONDecodeError as error:
                fault = error
                if error.pos < len(self.text) - 16 and not error.msg.startswith("Unterminated"):
                    raise  # not because the text ends here
            if len(self.text) - self.at > MAX_ROW_BYTES:
                raise ValueError(_TOO_LARGE)
            if not self.more(size):
                if fault:
                    raise fault
                break
            size *= 2
        if stop - self.at > MAX_ROW_BYTES:
            raise ValueError(_TOO_LARGE)
        found, self.at = self.text[self.at : stop], stop
        return found


def _json(path: Path) -> Iterator[Item]:
    """The rows of a JSON list; those of JSON lines under the wrong ending."""
    with path.open("rb") as file:
        head = file.read(_BLOCK).removeprefix(codecs.BOM_UTF8).lstrip()
    if head.startswith(b"{"):
        yield from _jsonl(path)
        return
    with path.open(encoding="utf-8-sig", newline="") as file:
        text, mark = _Text(file), ","
        try:
            text.take("[", "a JSON list of objects")
            if text.peek() == "]":
                mark = text.take("]", "")
            while mark == ",":
                text.peek()
                yield text.here(text.at), text.value().encode()
                mark = text.take(",]", '"," and a row, or "]"')
            if text.peek():
                text.take("", "nothing behind the list")
        except json.JSONDecodeError as error:
            yield text.here(error.pos), ValueError(f"not JSON: {error.msg}; reading stopped there")
        except (ValueError, RecursionError) as error:  # not UTF-8, too many digits, nested too deep
            yield text.here(text.at), ValueError(f"not read: {error}; reading stopped there")


def _jsonl(path: Path) -> Iterator[Item]:
    with path.open("rb") as file:
        line = 0
        while text := file.readline(MAX_ROW_BYTES + 1):
            line, size = line + 1, len(text)
            while size > MAX_ROW_BYTES and text and not text.endswith(b"\n"):
                text = file.readline(_BLOCK)
            if size > MAX_ROW_BYTES:
                yield line, ValueError(_TOO_LARGE)
            elif text := text.removeprefix(codecs.BOM_UTF8).strip():
                yield line, text


def _parquet(path: Path) -> Iterator[Item]:
    from pyarrow import parquet

    with load(f"input {path}: expected a parquet file"), parquet.ParquetFile(path) as file:
        groups = (file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
        if (most := max(groups, default=0)) > MAX_GROUP_BYTES:
            raise ConfigError(f"input {path}: a row group has {most} bytes; expected at most {MAX_GROUP_BYTES}")
        yield from _numbered(file.iter_batches(CHUNK_ROWS))


def _numbered(batches: Iterable[Any]) -> Iterator[Item]:
    row = 1
    for batch in batches:
        yield row, batch
        row += batch.num_rows


_READERS: dict[str, Callable[[Path], Iterator[Item]]] = {".json": _json, ".jsonl": _jsonl, ".parquet": _parquet}


def chunks_of(source: Source) -> Iterator[list[Item]]:
    """The items of a source in groups of CHUNK_ROWS or CHUNK_BYTES; a batch of rows is a group of its own."""
    group, size = [], 0
    for item in source.items():
        is_one = isinstance(item[1], bytes | ValueError)
        group.append(item)
        size += len(item[1]) if isinstance(item[1], bytes) else 0
        if not is_one or len(group) == CHUNK_ROWS or size >= CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group
