"""Test overlap and cover of regions, along either axis."""

import pytest

from verl_patches.errors import ConfigError
from verl_patches.reshard.region import Region, cover, overlap

SHAPE = (6, 4)


def rows(start, stop):
    return Region("w", 0, start, stop)


def columns(start, stop):
    return Region("w", 1, start, stop)


def test_overlap_along_one_axis_and_of_a_whole_tensor():
    assert overlap(rows(0, 4), rows(2, 6), SHAPE) == rows(2, 4)
    assert overlap(rows(0, 2), rows(2, 6), SHAPE) is None
    assert overlap(rows(3, 3), rows(0, 6), SHAPE) is None
    assert overlap(rows(0, 6), columns(1, 3), SHAPE) == overlap(columns(1, 3), rows(0, 6), SHAPE) == columns(1, 3)
    with pytest.raises(ConfigError, match=r"w\[0:3\] with w\[:, 0:2\]"):
        overlap(rows(0, 3), columns(0, 2), SHAPE)


@pytest.mark.parametrize(
    ("wanted", "pieces", "missing", "doubled"),
    [
        (rows(1, 5), [rows(0, 3), rows(3, 6)], [], []),
        (rows(1, 5), [rows(3, 6), rows(0, 2)], [rows(2, 3)], []),
        (rows(0, 6), [rows(0, 4), rows(3, 6)], [], [rows(3, 4)]),
        (rows(0, 6), [rows(0, 6), rows(1, 2), rows(4, 5)], [], [rows(1, 2), rows(4, 5)]),
        (rows(0, 6), [], [rows(0, 6)], []),
        (rows(0, 6), [columns(0, 1), columns(2, 4)], [columns(1, 2)], []),
        (columns(1, 3), [rows(0, 6)], [], []),
    ],
)
def test_cover_names_gaps_and_doubles(wanted, pieces, missing, doubled):
    assert cover(wanted, pieces, SHAPE) == (missing, doubled)
