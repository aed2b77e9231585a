"""Write a folder of data as parquet files, so that it appears whole or not at all."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError
from verl_patches.shared_files import PARTIAL, sync
from verl_patches.tools.data.handlers import conversation_row

if TYPE_CHECKING:
    import pyarrow

TRAIN, TEST, MANIFEST = "train.parquet", "test.parquet", "manifest.json"
GROUP_ROWS = 1024


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a scratch folder, whose `out` takes the name `target` if the block ends well and it holds files.

    It is `.NAME.partial` beside `target`, and is removed in the end. Raise ConfigError where `target` or a scratch
    folder exists, or cannot be written.
    """
    work = target.with_name(f".{target.name}{PARTIAL}") if target.name else target
    try:
        if target.exists():
            raise FileExistsError
        work.mkdir(parents=True)  # of two builds at once the second fails here, and removes nothing
        try:
            (work / "out").mkdir()
            yield work
            if files := list((work / "out").iterdir()):
                for file in files:
                    sync(file)
                (work / "out").rename(target)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except FileExistsError:
        found = f"output {target if target.exists() else work}: expected a new folder, found an existing one"
        raise ConfigError(f"{found}; remove it, or give another folder with -o") from None
    except OSError as error:
        raise ConfigError(f"output {target}: cannot be written ({error}); free or repair the disk") from error


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
