"""Write a folder of data as parquet files, so that it appears whole or not at all."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.shared_files import LOCK, PARTIAL, locked_folder, sync
from verl_patches.tools.data.handlers import conversation_row

if TYPE_CHECKING:
    import pyarrow

TRAIN, TEST, MANIFEST = "train.parquet", "test.parquet", "manifest.json"
GROUP_ROWS = 1024


@contextmanager
def replaced_folder(target: Path, overwrite: bool) -> Iterator[Path]:
    """Yield a scratch folder, whose `out` takes the name `target` if the block ends well and it holds files.

    It is `.NAME.partial/scratch` beside `target`, locked while it is used; leftovers of a killed call are removed
    first, and all of it in the end. Raise ConfigError where `target` exists (with `overwrite`: unless all its files are
    TRAIN, TEST and MANIFEST), cannot be written, or is being written.
    """

    def output_error(text: object) -> ConfigError:
        return ConfigError(f"output {target}: {text}, or choose another output folder")

    if target.name in ("", "..") or not target.name.isprintable():
        raise output_error("expected a path that ends in a printable folder name; correct it")
    work = target.with_name(f".{target.name}{PARTIAL}")
    scratch, replaced = work / "scratch", work / "scratch" / "old"
    with locked_folder(work, lambda: output_error("another process is writing it; wait until it ends"), output_error):
        try:
            if replaced.exists() and not target.exists():  # a call was killed between its two renames
                replaced.rename(target)
            if target.is_symlink() or (target.exists() and not target.is_dir()):
                raise output_error("expected a folder or no file, found a file or a link; remove it")
            there = {path.name for path in target.iterdir()} if target.exists() else set()
            if others := there - {TRAIN, TEST, MANIFEST}:
                expected = f"{TRAIN}, {TEST} and {MANIFEST}"
                raise output_error(f"expected only {expected}, found other files, such as {min(others)!r}; remove them")
            if there and not overwrite:
                raise output_error("expected a new folder, found an existing one; replace it with --overwrite")
            shutil.rmtree(scratch, ignore_errors=True)
            (scratch / "out").mkdir(parents=True)
            yield scratch
            if files := list((scratch / "out").iterdir()):
                for file in files:
                    sync(file)
                if target.exists():
                    target.rename(replaced)
                (scratch / "out").rename(target)
        except OSError as error:
            raise output_error(f"cannot be written ({error}); free or repair the disk") from error
        finally:
            if replaced.exists() and not target.exists():  # the second rename failed
                replaced.rename(target)
            shutil.rmtree(scratch, ignore_errors=True)
            with suppress(OSError):
                (work / LOCK).unlink()
                work.rmdir()


def write_manifest(folder: Path, **facts: Any) -> None:
    """Write what a folder of data was made of."""
    manifest = {"format": "verl_patches data", "version": 1, **facts}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def write_rows(path: Path, rows: Iterable[dict[str, Any]], schema: pyarrow.Schema) -> None:
    """Write rows to a parquet file, numbered in extra_info.index, with the file's stem as .split.

    Rows with a response become conversations where the schema has messages. At most GROUP_ROWS rows are held at a time;
    the file's bytes depend only on the rows.
    """
    import pyarrow
    from pyarrow import parquet

    numbered = enumerate(map(conversation_row, rows) if "messages" in schema.names else rows)
    with parquet.ParquetWriter(path, schema) as writer:
        while group := list(itertools.islice(numbered, GROUP_ROWS)):
            for number, row in group:
                row["extra_info"] |= {"index": number, "split": path.stem}
            writer.write_table(pyarrow.Table.from_pylist([row for _, row in group], schema))
