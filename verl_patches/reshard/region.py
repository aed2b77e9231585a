"""Compute bytes, overlap and cover of regions, the parts of HF tensors that a weight sync plans, sends and writes.

In each bucket a rank sends another rank one segment. Regions lie in it in order, each from a multiple of ALIGN_BYTES
on, so that the receiver can view its bytes in any dtype. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import DTYPE_BYTES, Parameter
from verl_patches.layout.sharding import Shard

ALIGN_BYTES = 16


class Region(NamedTuple):
    """Describe rows (or columns) [start, stop) along `axis` of the HF tensor `name`, whole in every other dimension.

    A tensor that no layout cuts is [0, shape[0]) along axis 0.
    """

    name: str
    axis: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Return the length along `axis`."""
        return self.stop - self.start

    def shape_in(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """Return the region's own shape, given the HF tensor's."""
        return tuple(self.rows if i == self.axis else n for i, n in enumerate(whole))

    def along_axis(self, axis: int, shape: Sequence[int]) -> Region:
        """Return this region as rows along `axis` if it is the complete HF tensor of `shape`, otherwise unchanged."""
        if (self.start, self.stop) == (0, shape[self.axis]):
            return Region(self.name, axis, 0, shape[axis])
        return self

    def __str__(self) -> str:
        return f"{self.name}[{':, ' * self.axis}{self.start}:{self.stop}]"


def shard_region(shard: Shard) -> Region:
    """Return the region of its HF tensor that `shard` holds, without padding of the vocabulary."""
    parameter = shard.parameter
    if shard.axis is None:
        return Region(parameter.name, 0, 0, parameter.shape[0])
    return Region(parameter.name, shard.axis, shard.start, shard.start + shard.shape[shard.axis] - shard.padding)


def align(size_bytes: int) -> int:
    """Return `size_bytes` rounded up to a multiple of ALIGN_BYTES."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def row_bytes(parameter: Parameter, axis: int) -> int:
    """Return the bytes of one row (column) of `parameter` along `axis`, in the dtype that is sent: the inventory's."""
    return parameter.count // parameter.shape[axis] * DTYPE_BYTES[parameter.dtype]


def wire_bytes(parameter: Parameter, region: Region) -> int:
    """Return the aligned bytes that `region`, a part of `parameter`, takes in a segment."""
    return align(region.rows * row_bytes(parameter, region.axis))


def overlap(a: Region, b: Region, shape: Sequence[int]) -> Region | None:
    """Return the region that two regions of one HF tensor of `shape` share, None if they share nothing.

    Raises ConfigError for two parts cut along different axes: their intersection is not a region.
    """
    a, b = _with_common_axis(a, b, shape)
    if a.axis != b.axis:
        raise _different_axes(a, b)
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Region(a.name, a.axis, start, stop) if start < stop else None


def contains(held: Region, wanted: Region, shape: Sequence[int]) -> bool:
    """Return whether `wanted` has rows, and all of them lie in `held`, a region of the same HF tensor of `shape`."""
    held, wanted = _with_common_axis(held, wanted, shape)
    same_rows = (held.name, held.axis) == (wanted.name, wanted.axis)
    return same_rows and held.start <= wanted.start < wanted.stop <= held.stop


def region_view(tensor: Any, held: Region, wanted: Region, shape: Sequence[int]) -> Any:
    """Return the view of `wanted` in `tensor`, which has the shape of `held`; None if `wanted` is not inside `held`."""
    if not contains(held, wanted, shape):
        return None
    first = held.start if held.axis == wanted.axis else 0
    return tensor.narrow(wanted.axis, wanted.start - first, wanted.rows)


def cover(wanted: Region, pieces: Iterable[Region], shape: Sequence[int]) -> tuple[list[Region], list[Region]]:
    """Return (parts of `wanted` that no piece covers, parts that several cover); pieces may exceed `wanted`.

    Raises ConfigError for pieces cut along different axes.
    """
    overlaps = (overlap(wanted, piece, shape) for piece in pieces)
    shared = sorted((part for part in overlaps if part is not None), key=lambda part: part[1:])
    if shared:
        wanted = wanted.along_axis(shared[0].axis, shape)
    missing, doubled, reached = [], [], wanted.start
    for piece in shared:
        if piece.axis != wanted.axis:
            raise _different_axes(shared[0], piece)
        if piece.start > reached:
            missing.append(wanted._replace(start=reached, stop=piece.start))
        if piece.start < min(reached, piece.stop):
            doubled.append(wanted._replace(start=piece.start, stop=min(reached, piece.stop)))
        reached = max(reached, piece.stop)
    if reached < wanted.stop:
        missing.append(wanted._replace(start=reached))
    return missing, doubled


def _different_axes(a: Region, b: Region) -> ConfigError:
    return ConfigError(f"reshard: cannot compare {a} with {b}: expected both to be cut along one axis")


def _with_common_axis(a: Region, b: Region, shape: Sequence[int]) -> tuple[Region, Region]:
    """Return both regions along one axis, which is possible where at least one is a complete tensor."""
    if a.axis != b.axis:
        a = a.along_axis(b.axis, shape)
        b = b.along_axis(a.axis, shape)
    return a, b
