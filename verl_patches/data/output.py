"""The folder that data comes out as: parquet files of rows, whole or not there."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.shared_files import LOCK, PARTIAL, locked_folder, sync

if TYPE_CHECKING:
    import pyarrow

TRAIN, TEST, MANIFEST = "train.parquet", "test.parquet", "manifest.json"
GROUP_ROWS, GROUP_BYTES = 1024, 16 << 20  # of a row group, as JSON


@contextmanager
def whole_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder for scratch; its folder `out`, if the block ends well and it holds files, takes the name `target`.

    It is `.NAME.partial/scratch` beside `target`, whose parent is locked while it is used; what a killed call has left
    there is removed first, and all but files of others in the end. ConfigError where `target` is taken (`overwrite`: by
    files that have other names than these), cannot be written, or is being written, and where the parent is a link.
    """
    work = target.with_name(f".{target.name}{PARTIAL}") if target.name not in ("", "..") else target
    scratch = work / "scratch"
    old, out = scratch / "old", scratch / "out"

    def wrong(text: object) -> ConfigError:
        return ConfigError(f"output {target}: {text}; choose another output_prefix")

    if work == target or not target.name.isprintable():
        raise wrong("expected the path of a folder to make")
    if os.path.islink(work) or os.path.islink(scratch):
        raise wrong(f"{work.name} beside it, or scratch there, is a link")
    with locked_folder(work, lambda: wrong("another process writes it: wait for its end"), wrong):
        try:
            if old.exists() and not target.exists():  # a call was killed between its two renames
                old.rename(target)
            if target.is_symlink() or (target.exists() and not target.is_dir()):
                raise wrong("expected a folder or nothing")
            there = {path.name for path in target.iterdir()} if target.exists() else set()
            if others := there - {TRAIN, TEST, MANIFEST}:
                raise wrong(f"holds other files, such as {min(others)!r}")
            if there and not overwrite:
                raise wrong("exists already: give --overwrite to replace it")
            shutil.rmtree(scratch, ignore_errors=True)
            out.mkdir(parents=True)
            yield scratch
            if files := list(out.iterdir()):
                for file in files:
                    sync(file)
                if target.exists():
                    target.rename(old)
                out.rename(target)
        except (OSError, sqlite3.Error) as error:
            raise wrong(error) from error
        finally:
            if old.exists() and not target.exists():  # the second rename failed
                old.rename(target)
            shutil.rmtree(scratch, ignore_errors=True)
            with suppress(OSError):
                (work / LOCK).unlink()
                work.rmdir()


def write_rows(
    path: Path, rows: Iterable[str | bytes], schema: pyarrow.Schema, progress: Callable[[int], Any] = lambda _: None
) -> None:
    """Write rows, each as JSON, to a parquet file, numbered in extra_info.index, with the file's stem as .split.

    At most GROUP_ROWS rows are held at a time, or those of GROUP_BYTES; the file's bytes depend on the rows alone.
    """
    import pyarrow
    from pyarrow import parquet

    group: list[dict[str, Any]] = []
    with parquet.ParquetWriter(path, schema) as writer:

        def flush() -> None:
            writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
            progress(len(group))
            group.clear()

        size = 0
        for number, text in enumerate(rows):
            group.append(json.loads(text))
            group[-1]["extra_info"] |= {"index": number, "split": path.stem}
            size += len(text)
            if len(group) == GROUP_ROWS or size > GROUP_BYTES:
                flush()
                size = 0
        if group:
            flush()
