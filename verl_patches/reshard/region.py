"""Regions, the parts of HF tensors in which weights are planned, sent and written: their bytes, and what two share.

In each bucket a rank sends another rank one segment. Regions lie in it in order, each from a multiple of ALIGN_BYTES
on, so that the receiver can view its bytes in any dtype. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import DTYPE_BYTES, Parameter
from verl_patches.layout.sharding import Shard

ALIGN_BYTES = 16


class Region(NamedTuple):
    """Rows (or columns) [start, stop) along `axis` of the HF tensor `name`, whole in every other dimension.

    A tensor that no layout cuts is [0, shape[0]) along axis 0.
    """

    name: str
    axis: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Length along `axis`."""
        return self.stop - self.start

    def shape_in(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The region's own shape, given the HF tensor's."""
        return tuple(self.rows if i == self.axis else n for i, n in enumerate(whole))

    def is_whole(self, shape: Sequence[int]) -> bool:
        """Whether it is all of its HF tensor of `shape`."""
        return (self.start, self.stop) == (0, shape[self.axis])

    def along(self, axis: int, shape: Sequence[int]) -> Region:
        """A whole tensor has one name for each axis: the one along `axis`. A part is returned as it is."""
        return Region(self.name, axis, 0, shape[axis]) if self.is_whole(shape) else self

    def __str__(self) -> str:
        return f"{self.name}[{':, ' * self.axis}{self.start}:{self.stop}]"


def region_of(shard: Shard) -> Region:
    """What `shard` holds of its HF tensor, without padding that no HF row backs."""
    parameter = shard.parameter
    if shard.axis is None:
        return Region(parameter.name, 0, 0, parameter.shape[0])
    return Region(parameter.name, shard.axis, shard.start, shard.start + shard.shape[shard.axis] - shard.padding)


def align(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole ALIGN_BYTES."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def row_bytes(parameter: Parameter, axis: int) -> int:
    """Bytes of one row (column) of `parameter` along `axis`, in the dtype that is sent: the inventory's."""
    return parameter.count // parameter.shape[axis] * DTYPE_BYTES[parameter.dtype]


def wire_bytes(parameter: Parameter, region: Region) -> int:
    """Bytes that `region`, a part of `parameter`, takes in a segment: those of its elements, aligned."""
    return align(region.rows * row_bytes(parameter, region.axis))


def overlap(a: Region, b: Region, shape: Sequence[int]) -> Region | None:
    """What two regions of one HF tensor of `shape` share; None if nothing.

    Raises ConfigError for two parts cut along different axes: what they share is no region.
    """
    if a.axis != b.axis:
        a = a.along(b.axis, shape)
        b = b.along(a.axis, shape)
        if a.axis != b.axis:
            raise _different_axes(a, b)
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Region(a.name, a.axis, start, stop) if start < stop else None


def part_of(tensor: Any, held: Region, wanted: Region, shape: Sequence[int]) -> Any:
    """The view of `wanted` in `tensor`, which has the shape of `held`, or None if `held` has not all of it."""
    if overlap(held, wanted, shape) not in (wanted, wanted.along(held.axis, shape)):
        return None
    first = held.start if held.axis == wanted.axis else 0
    return tensor.narrow(wanted.axis, wanted.start - first, wanted.rows)


def cover(wanted: Region, pieces: Iterable[Region], shape: Sequence[int]) -> tuple[list[Region], list[Region]]:
    """(parts of `wanted` that no piece covers, parts that more than one covers); pieces may reach over its ends."""
    shared = sorted((s for s in (overlap(wanted, p, shape) for p in pieces) if s is not None), key=lambda s: s[1:])
    wanted = wanted.along(shared[0].axis, shape) if shared else wanted
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
    return ConfigError(f"reshard: {a} and {b} are cut along different axes, which is not supported")
