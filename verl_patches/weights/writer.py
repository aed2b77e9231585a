"""Write files of weights in one pass each, and a folder of them as a checkpoint (manifest.py), without torch."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl_patches.errors import RecipeError
from verl_patches.heartbeat.heartbeat import current_heartbeat
from verl_patches.shared_files import PARTIAL, disk_errors, lock_file, sync, write_whole
from verl_patches.weights.manifest import (
    DIGEST_DIGITS,
    ENTRIES_FOLDER,
    MANIFEST,
    FileEntry,
    Manifest,
    TensorEntry,
    build_header,
    file_fields,
    read_record,
    to_json,
)

SYNC_BYTES = 256 << 20  # bytes of a file after which they are flushed to the disk
RERUN_ADVICE = "Free space and run the same command again: finished files are kept"


def write_text(path: Path, text: str | bytes, durable: bool = True) -> None:
    """Write a file by `write_whole`; a full disk raises RecipeError that names the file."""
    with disk_errors(path, RERUN_ADVICE):
        write_whole(path, text, durable)


class NewFile:
    """Write a file under another name, `partial`, until `finish` gives it its own name.

    It is a context manager; left without `finish`, also by an exception, it removes the partial file. Bytes are flushed
    to the disk every SYNC_BYTES, so that no more wait in the page cache, and then count in the process's heartbeat.
    Raises RecipeError for a full disk and where another process writes the same file.
    """

    def __init__(self, path: Path):
        self.path, self.partial, self._finished = path, path.with_name(path.name + PARTIAL), False
        self._cached_bytes = 0

    def __enter__(self) -> NewFile:
        with disk_errors(self.path, RERUN_ADVICE):
            try:
                self._file = lock_file(self.partial)
            except BlockingIOError:
                raise RecipeError(f"{self.partial}: another process writes this file; wait until it ends") from None
            self._file.truncate(0)
        return self

    def write(self, data: Any) -> None:
        """Append the bytes of any contiguous buffer."""
        view = memoryview(data).cast("B")
        with disk_errors(self.path, RERUN_ADVICE):
            while view:
                count = self._file.write(view[:SYNC_BYTES])
                view = view[count:]
                self._cached_bytes += count
                if self._cached_bytes >= SYNC_BYTES:
                    self._flush()

    def finish(self) -> None:
        """Make the bytes durable and give the file its name."""
        with disk_errors(self.path, RERUN_ADVICE):
            self._flush()
        os.replace(self.partial, self.path)
        self._finished = True

    def _flush(self) -> None:
        os.fsync(self._file.fileno())
        current_heartbeat().count_bytes(self._cached_bytes)
        self._cached_bytes = 0

    def __exit__(self, *exc: Any) -> None:
        if not self._finished:
            self.partial.unlink(missing_ok=True)
        self._file.close()


# ---- a checkpoint


def write_tensors(
    folder: str | Path, name: str, tensors: Sequence[TensorEntry], contents: Callable[[TensorEntry], Iterable[Any]]
) -> FileEntry:
    """Write and record a file of tensors, in the order of their bytes (`in_data_order`).

    `contents` yields buffers with a tensor's bytes, in order. A thread hashes each buffer while it is written.
    """
    path, head, found = Path(folder) / name, build_header(tensors, name), []
    with NewFile(path) as file, ThreadPoolExecutor(1) as thread:
        file.write(head)
        for tensor in tensors:
            digest, size = hashlib.sha256(), 0
            for data in contents(tensor):
                view = memoryview(data).cast("B")
                hashed = thread.submit(digest.update, view)
                file.write(view)
                hashed.result()  # the next buffer may be in the same memory
                size += len(view)
            if size != tensor.size_bytes:
                raise RecipeError(f"{path}: {tensor.key}: expected {tensor.size_bytes} bytes, found {size}")
            found.append(replace(tensor, sha256=digest.hexdigest()[:DIGEST_DIGITS]))
        file.finish()
    size = len(head) + sum(tensor.size_bytes for tensor in tensors)
    return _record_file(folder, FileEntry(name, size, tensors=tuple(found)))


def write_bytes(folder: str | Path, name: str, content: bytes) -> FileEntry:
    """Write and record a file without tensors."""
    write_text(Path(folder) / name, content)
    return _record_file(folder, FileEntry(name, len(content), hashlib.sha256(content).hexdigest()))


def _record_file(folder: str | Path, entry: FileEntry) -> FileEntry:
    """Record a finished file of a folder that is being written; without a record the folder stays incomplete."""
    entries = Path(folder) / ENTRIES_FOLDER
    entries.mkdir(exist_ok=True)
    write_text(entries / f"{entry.name}.json", json.dumps(file_fields(entry)), durable=False)
    return entry


def complete_folder(folder: Path, manifest: Manifest) -> Manifest | None:
    """Write `manifest` with the entries of its files into `folder` and return it, or None while entries are missing."""
    if {*manifest.file_names} - {path.stem for path in (folder / ENTRIES_FOLDER).glob("*.json")}:
        return None
    manifest = replace(manifest, files=tuple(read_record(folder, name) for name in manifest.file_names))
    sync(folder)  # makes the names of all files durable before the manifest that needs them
    write_text(folder / MANIFEST, to_json(manifest))
    shutil.rmtree(folder / ENTRIES_FOLDER, ignore_errors=True)
    for left in folder.glob(f"{MANIFEST}.*{PARTIAL}"):  # left by a process that was killed
        left.unlink(missing_ok=True)
    return manifest
