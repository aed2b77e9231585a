"""Write a folder of sharded weights (format: manifest.py): files in one pass each, complete by one rename at the end.

`begin`, then for each file a `FileWriter`, which may run in a process of its own, then `complete`. No torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError, RecipeError
from verl_patches.shared_files import PARTIAL, lock_file, sync, write_whole, writing
from verl_patches.weights.manifest import (
    ENTRIES,
    MANIFEST,
    Beside,
    FileDigest,
    FileEntry,
    Manifest,
    TensorEntry,
    file_fields,
    has_manifest,
    header_of,
    read_manifest,
    read_record,
    recorded,
    to_json,
)

AGAIN = "Free space and run the same command again: finished files are kept"


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """`write_whole`; RecipeError that names the file where the disk is full."""
    with writing(path, AGAIN):
        write_whole(path, text, durable)


def begin(folder: str | Path, manifest: Manifest) -> dict[str, FileEntry]:
    """Start `manifest`'s folder, or go on with it, and return the entries that were recorded before, by file name.

    The entries are not checked (see `file_problems`). Raises ConfigError for a folder that holds something else, or
    that has another identity.
    """
    folder = Path(folder)
    if has_manifest(folder):
        found = read_manifest(folder, complete=False)
        if found.identity != manifest.identity:
            unlike = [n for n in ("kind", "layout", "dtype", "model") if getattr(found, n) != getattr(manifest, n)]
            what = "; ".join(f"{n} {getattr(found, n)}, expected {getattr(manifest, n)}" for n in unlike)
            raise ConfigError(
                f"{folder}: holds the result of another conversion ({what or 'of another source'}); "
                "choose another folder or remove this one"
            )
        if found.complete:
            return {file.name: file for file in found.files}
    else:
        if folder.exists() and (not folder.is_dir() or any(p.suffix != PARTIAL for p in folder.iterdir())):
            raise ConfigError(f"{folder}: exists and is no folder of this command; expected an empty or a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / MANIFEST, to_json(replace(manifest, files=(), complete=False)))
    entries = {}
    for name in recorded(folder):
        if name in manifest.expected:
            with contextlib.suppress(ConfigError):  # unreadable after a loss of power: its file is written again
                entries[name] = read_record(folder, name)
    return entries


def record(folder: str | Path, entry: FileEntry) -> None:
    """Record a finished file of a folder that is being written; not durable, as a lost entry only costs the file."""
    entries = Path(folder) / ENTRIES
    entries.mkdir(exist_ok=True)
    write_text(entries / f"{entry.name}.json", json.dumps(file_fields(entry)), durable=False)


def complete(folder: str | Path) -> Manifest | None:
    """Write the complete manifest if every expected file is recorded, and return it; None while some are missing."""
    manifest = read_manifest(folder, complete=False)
    if manifest.complete:  # a file of it was written again
        shutil.rmtree(Path(folder) / ENTRIES, ignore_errors=True)
        return manifest
    return complete_as(Path(folder), manifest)


def complete_as(folder: Path, manifest: Manifest) -> Manifest | None:
    """Write `manifest` with the entries of its files into `folder` as complete, and return it; None while some lack.

    A checkpoint's folder has no manifest before this call: it is complete where its manifest stands.
    """
    if set(manifest.expected) - set(recorded(folder)):
        return None
    files = tuple(read_record(folder, name) for name in manifest.expected)
    manifest = replace(manifest, files=files, complete=True)
    sync(folder)  # the names of all files, before the manifest that needs them
    write_text(folder / MANIFEST, to_json(manifest))
    shutil.rmtree(folder / ENTRIES, ignore_errors=True)
    for left in folder.glob(f"{MANIFEST}.*{PARTIAL}"):  # of a process that was killed
        left.unlink(missing_ok=True)
    return manifest


class FileWriter:
    """Write one file of a folder in one pass: `write` the bytes in order, `finish` renames and records it.

    A context manager; left without `finish`, also by an exception, it removes what it wrote. `tensors` in the order of
    their bytes (`in_data_order`); without tensors it is any other file. Hashing runs in a thread beside writing.
    Raises RecipeError for a full disk and where another process writes the same file.
    """

    def __init__(self, folder: str | Path, name: str, tensors: Sequence[TensorEntry] = ()):
        self.path, self.tensors = Path(folder) / name, tuple(tensors)
        self.partial = self.path.with_name(name + PARTIAL)
        self._written, self._finished = 0, False

    def __enter__(self) -> FileWriter:
        head = header_of(self.tensors, str(self.path))
        try:
            self._file = lock_file(self.partial)
        except BlockingIOError:
            raise RecipeError(f"{self.partial}: another process writes this file; wait for it") from None
        self._file.truncate(0)
        self._digest, self._beside = FileDigest(head, [tensor.size_bytes for tensor in self.tensors]), Beside()
        try:
            self._put(head)
        except BaseException:
            self.__exit__()
            raise
        return self

    def write(self, data: Any) -> None:
        """Append the next bytes (any contiguous buffer), which may end inside a tensor.

        The buffer may be changed once the next `write` or `finish` has returned, not before.
        """
        view = memoryview(data).cast("B")
        self._beside.add(self._hash, view)
        self._put(view)

    def _put(self, view: Any) -> None:
        with writing(self.path, AGAIN):
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])
        self._written += len(view)

    def _hash(self, view: memoryview) -> None:
        if more := self._digest.update(view):
            raise RecipeError(f"{self.path}: {more} bytes more than its tensors have")

    def finish(self) -> FileEntry:
        """Make the bytes durable, give the file its name, and record it. RecipeError where bytes are missing."""
        self._beside.wait()
        if missing := self._digest.missing:
            name = self.tensors[len(self._digest.tensors)].key
            raise RecipeError(f"{self.path}: {missing} bytes are missing, from {name} on")
        with writing(self.path, AGAIN):
            os.fsync(self._file.fileno())
        os.replace(self.partial, self.path)
        self._finished = True
        tensors = tuple(replace(t, sha256=each) for t, each in zip(self.tensors, self._digest.tensors, strict=True))
        entry = FileEntry(self.path.name, self._written, self._digest.hexdigest(), tensors)
        record(self.path.parent, entry)
        return entry

    def __exit__(self, *exc: Any) -> None:
        self._beside.close()
        if not self._finished:
            self.partial.unlink(missing_ok=True)
        self._file.close()
