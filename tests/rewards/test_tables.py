"""Splitting and writing task tables."""

import os

import pyarrow.parquet
import pytest

from verl_patches.errors import ConfigError
from verl_patches.rewards.tables import shuffled_split, verl_row, write_tables

ROWS = [verl_row("source", f"question {i}", str(i), "math", origin=f"f:{i}") for i in range(50)]


def questions(rows):
    return [row["prompt"][0]["content"] for row in rows]


def test_split_keeps_every_row_once_and_depends_on_the_seed_only():
    train, test = shuffled_split(ROWS, 0.2, seed=3)
    assert (len(train), len(test)) == (40, 10)
    assert sorted(questions(train) + questions(test)) == sorted(questions(ROWS))
    assert questions(train) != questions(ROWS)[10:]
    assert shuffled_split(ROWS, 0.2, seed=3) == (train, test)
    assert shuffled_split(ROWS, 0.2, seed=4) != (train, test)
    assert [row["extra_info"]["index"] for row in train] == list(range(40))
    assert {row["extra_info"]["split"] for row in test} == {"test"}


@pytest.mark.parametrize(("size", "rows"), [(0.001, 1), (0.1, 5), (1, 1), (7, 7), (49, 49)])
def test_sizes(size, rows):
    assert len(shuffled_split(ROWS, size, seed=0)[1]) == rows


@pytest.mark.parametrize("size", [0, -1, 1.5, 50, 0.999, float("nan"), float("inf")])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ConfigError, match="test size"):
        shuffled_split(ROWS, size, seed=0)


def test_written_tables_read_back(tmp_path):
    train, test = shuffled_split(ROWS, 0.2, seed=0)
    for path, rows in zip(write_tables(tmp_path / "new" / "folder", train, test), (train, test), strict=True):
        assert pyarrow.parquet.read_table(path).to_pylist() == rows
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == ["test.parquet", "train.parquet"]


def test_nothing_is_overwritten_unasked(tmp_path):
    write_tables(tmp_path, ROWS[:3], ROWS[3:5])
    with pytest.raises(ConfigError, match=r"train\.parquet and test\.parquet exist already.*--overwrite"):
        write_tables(tmp_path, ROWS[5:], ROWS[:5])
    assert pyarrow.parquet.read_table(tmp_path / "train.parquet").num_rows == 3
    write_tables(tmp_path, ROWS[5:], ROWS[:5], overwrite=True)
    assert pyarrow.parquet.read_table(tmp_path / "train.parquet").num_rows == 45
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="found a file"):
        write_tables(tmp_path / "file", ROWS[5:], ROWS[:5])


def test_a_failure_leaves_the_old_files_whole(tmp_path):
    write_tables(tmp_path, ROWS[:3], ROWS[3:5])
    broken = [{**ROWS[0], "prompt": 7}]
    with pytest.raises(Exception, match="struct|list|convert"):
        write_tables(tmp_path, ROWS, broken, overwrite=True)
    assert pyarrow.parquet.read_table(tmp_path / "train.parquet").num_rows == 3
    assert sorted(os.listdir(tmp_path)) == ["test.parquet", "train.parquet"]
