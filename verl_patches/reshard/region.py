"""A block of one HF tensor: the unit in which weights are planned, sent and written. No torch.

How many bytes a region takes between ranks. No torch.

Inside one segment (all that one rank sends to another in one bucket) regions lie in order, each from a multiple of
ALIGN_BYTES on, so that a receiver can view its bytes in any dtype.

Regions against each other: what two of them share, whether many of them cover one exactly once. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import DTYPE_BYTES, Parameter
from verl_patches.layout.sharding import Shard


class Region(NamedTuple):
    """Rows (or columns) [start, stop) along `axis` of the HF tensor `name`, whole in every other dimension.

    A tensor that nothing cuts is [0, shape[0]) along axis 0.
    """

    name: str
    axis: int
    start: int
    stop: int

    def shape_in(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        """The region's own shape, given the HF tensor's."""
        return tuple(self.stop - self.start if i == self.axis else n for i, n in enumerate(whole))

    def __str__(self) -> str:
        return f"{self.name}[{':, ' * self.axis}{self.start}:{self.stop}]"


def region_of(shard: Shard) -> Region:
    """What `shard` holds of its HF tensor, without padding that no HF row backs."""
    parameter = shard.parameter
    if shard.axis is None:
        return Region(parameter.name, 0, 0, parameter.shape[0])
    return Region(parameter.name, shard.axis, shard.start, shard.start + shard.shape[shard.axis] - shard.padding)


ALIGN_BYTES = 16


def align(size_bytes: int) -> int:
    """`size_bytes` rounded up to whole ALIGN_BYTES."""
    return -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES


def row_bytes(parameter: Parameter, axis: int) -> int:
    """Bytes of one row (column) of `parameter` along `axis`, in its wire dtype: the inventory's."""
    return parameter.count // parameter.shape[axis] * DTYPE_BYTES[parameter.dtype]


def wire_bytes(parameter: Parameter, region: Region) -> int:
    """Bytes that `region`, a part of `parameter`, takes in a segment: those of its elements, aligned."""
    return align((region.stop - region.start) * row_bytes(parameter, region.axis))


def is_whole(region: Region, shape: Sequence[int]) -> bool:
    """Whether `region` is all of its HF tensor of `shape`."""
    return (region.start, region.stop) == (0, shape[region.axis])


def overlap(a: Region, b: Region, shape: Sequence[int]) -> Region | None:
    """What two regions of one HF tensor of `shape` share; None if nothing.

    Raises ConfigError for two parts cut along different axes: what they share is no region.
    """
    if a.axis != b.axis:
        if is_whole(a, shape):
            a = Region(a.name, b.axis, 0, shape[b.axis])
        elif is_whole(b, shape):
            b = Region(b.name, a.axis, 0, shape[a.axis])
        else:
            raise ConfigError(f"reshard: {a} and {b} are cut along different axes, which is not supported")
    start, stop = max(a.start, b.start), min(a.stop, b.stop)
    return Region(a.name, a.axis, start, stop) if start < stop else None


def part_of(tensor: Any, held: Region, wanted: Region, shape: Sequence[int]) -> Any:
    """The view of `wanted` in `tensor`, which has the shape of `held`, or None if `held` has not all of it."""
    if overlap(held, wanted, shape) not in (wanted, Region(wanted.name, held.axis, 0, shape[held.axis])):
        return None
    first = held.start if held.axis == wanted.axis else 0
    return tensor.narrow(wanted.axis, wanted.start - first, wanted.stop - wanted.start)


def cover(wanted: Region, pieces: Iterable[Region], shape: Sequence[int]) -> tuple[list[Region], list[Region]]:
    """(parts of `wanted` that no piece covers, parts that more than one covers); pieces may reach over its ends."""
    shared = sorted((s for s in (overlap(wanted, p, shape) for p in pieces) if s is not None), key=lambda s: s[1:])
    axis = shared[0].axis if shared else wanted.axis
    start, end = (wanted.start, wanted.stop) if axis == wanted.axis else (0, shape[axis])
    missing, doubled, reached = [], [], start
    for piece in shared:
        if piece.axis != axis:
            raise ConfigError(f"reshard: {shared[0]} and {piece} are cut along different axes, which is not supported")
        if piece.start > reached:
            missing.append(Region(wanted.name, axis, reached, piece.start))
        if piece.start < min(reached, piece.stop):
            doubled.append(Region(wanted.name, axis, piece.start, min(reached, piece.stop)))
        reached = max(reached, piece.stop)
    if reached < end:
        missing.append(Region(wanted.name, axis, reached, end))
    return missing, doubled
