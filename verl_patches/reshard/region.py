"""A block of one HF tensor: the unit in which weights are planned, sent and written. No torch."""

from __future__ import annotations

from typing import NamedTuple

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
