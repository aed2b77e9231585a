"""The folder that data comes out as: parquet files of rows, whole or not there."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.data.handlers import Row
from verl_patches.errors import ConfigError
from verl_patches.shared_files import LOCK, PARTIAL, locked_folder, sync

if TYPE_CHECKING:
    import pyarrow

TRAIN, TEST, MANIFEST = "train.parquet", "test.parquet", "manifest.json"
GROUP_ROWS, GROUP_CHARS = 4096, 32 << 20  # of a row group


@contextmanager
def whole_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder for scratch; its folder `out`, if the block ends well and it holds files, takes the name `target`.

    The new folder is `.NAME.partial` beside `target`, locked while it is used and removed in the end; what a killed
    call has left there is removed first. ConfigError where `target` is taken (`overwrite`: by other files than these),
    cannot be written, or is being written.
    """
    if target.name in ("", "..") or "\0" in str(target):
        raise ConfigError(f"output {target}: expected the path of a folder to make")
    work = target.with_name(f".{target.name}{PARTIAL}")
    busy = ConfigError(f"output {target}: another process writes it; wait for its end, or choose another output_prefix")

    def unusable(error: OSError) -> ConfigError:
        return ConfigError(f"output {target}: cannot be written ({error}); choose another output_prefix")

    old, out = work / "old", work / "out"
    with locked_folder(work, lambda: busy, unusable):
        try:
            if old.exists() and not target.exists():  # a call was killed between its two renames
                old.rename(target)
            _check_free(target, overwrite)
            _clear(work)
            out.mkdir()
            yield work
            for file in (files := list(out.iterdir())):
                sync(file)
            if files and target.exists():
                target.rename(old)
            if files:
                out.rename(target)
        except OSError as error:
            raise unusable(error) from error
        finally:
            _clear(work)
            (work / LOCK).unlink()
            work.rmdir()


def _check_free(target: Path, overwrite: bool) -> None:
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ConfigError(f"output {target}: expected a folder or nothing; choose another output_prefix")
    there = {path.name for path in target.iterdir()} if target.exists() else set()
    if others := there - {TRAIN, TEST, MANIFEST}:
        raise ConfigError(f"output {target}: holds other files, as {min(others)!r}; choose another output_prefix")
    if there and not overwrite:
        raise ConfigError(f"output {target}: exists already; choose another output_prefix or give --overwrite")


def _clear(work: Path) -> None:
    for path in work.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK:
            path.unlink()


def write_rows(
    path: Path, rows: Iterable[Row], schema: pyarrow.Schema, progress: Callable[[int], Any] = lambda _: None
) -> int:
    """Write rows to a parquet file, numbered in extra_info.index, with the file's stem as .split; how many they were.

    At most GROUP_ROWS rows, or those of GROUP_CHARS characters, are held at a time; the bytes depend on the rows alone.
    """
    import pyarrow
    from pyarrow import parquet

    count, chars, group = 0, 0, []
    with parquet.ParquetWriter(path, schema) as writer:

        def flush() -> None:
            if group:
                writer.write_table(pyarrow.Table.from_pylist(group, schema=schema))
                group.clear()

        for row in rows:
            row["extra_info"] |= {"index": count, "split": path.stem}
            group.append(row)
            count, chars = count + 1, chars + len(str(row))
            if len(group) == GROUP_ROWS or chars > GROUP_CHARS:
                progress(len(group))
                flush()
                chars = 0
        progress(len(group))
        flush()
    return count
