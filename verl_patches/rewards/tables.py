"""Task tables: rows in the schema that verl's RLHFDataset reads, their split, and how they are written."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from verl_patches.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]


def verl_row(
    data_source: str, prompt: str, ground_truth: str, ability: str, solution: str = "", origin: str = ""
) -> Row:
    """One row of verl's schema: data_source, prompt (one user message), ability, reward_model, extra_info.

    extra_info holds index and split (filled in by `number`), answer, solution and origin (file and line, or how it was
    made).
    """
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": -1, "split": "", "answer": ground_truth, "solution": solution, "origin": origin},
    }


def number(rows: list[Row], split: str) -> list[Row]:
    """The same rows with extra_info.index counting from 0 and extra_info.split set; the given rows stay as they are."""
    return [{**row, "extra_info": {**row["extra_info"], "index": i, "split": split}} for i, row in enumerate(rows)]


def shuffled_split(rows: list[Row], test_size: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Shuffle by seed and split into (train, test), both numbered.

    `test_size` below 1 is a share of the rows (rounded, at least one row), from 1 on a number of rows. Raises
    ConfigError unless that leaves at least one row on either side: verl refuses an empty validation set.
    """
    if not 0 < test_size < float("inf") or (test_size >= 1 and test_size != int(test_size)):
        raise ConfigError(f"test size: expected a share in 0..1 or a whole number of rows, found {test_size}")
    test_rows = int(test_size) if test_size >= 1 else max(1, round(test_size * len(rows)))
    if test_rows >= len(rows):
        raise ConfigError(
            f"test size: {test_rows} of {len(rows)} rows leave none to train on: give a smaller test size"
        )
    mixed = list(rows)
    Random(seed).shuffle(mixed)
    return number(mixed[test_rows:], "train"), number(mixed[:test_rows], "test")


def write_tables(folder: Path, train: list[Row], test: list[Row], overwrite: bool = False) -> tuple[Path, Path]:
    """Write folder/train.parquet and folder/test.parquet and return their paths.

    Both are first written whole beside their place and then renamed, so no reader ever sees half a file. Raises
    ConfigError, and changes nothing, if one of them exists and `overwrite` is not set, or if the folder's place is
    taken by a file.
    """
    import pyarrow
    import pyarrow.parquet

    targets = {folder / "train.parquet": train, folder / "test.parquet": test}
    check_free(folder, overwrite)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".tables.", dir=folder) as building:
        for target, rows in targets.items():
            table = pyarrow.Table.from_pylist(rows, schema=_schema())
            pyarrow.parquet.write_table(table, Path(building) / target.name)
        for target in targets:
            os.replace(Path(building) / target.name, target)
    return folder / "train.parquet", folder / "test.parquet"


def check_free(folder: Path, overwrite: bool) -> None:
    """Raise ConfigError if `write_tables` would refuse this folder; cheap, so that it can be asked before long work."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"output {folder}: expected a folder or nothing, found a file: choose another --output")
    taken = [name for name in ("train.parquet", "test.parquet") if (folder / name).exists()]
    if taken and not overwrite:
        raise ConfigError(
            f"output {folder}: {' and '.join(taken)} exist already: choose another --output or give --overwrite"
        )


def _schema() -> pyarrow.Schema:
    import pyarrow as pa

    text = pa.string()
    extra = [("index", pa.int64()), ("split", text), ("answer", text), ("solution", text), ("origin", text)]
    return pa.schema(
        [
            ("data_source", text),
            ("prompt", pa.list_(pa.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", pa.struct([("style", text), ("ground_truth", text)])),
            ("extra_info", pa.struct(extra)),
        ]
    )
