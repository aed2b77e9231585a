"""What a compiled sync is made of: ends of a copy, memory that comes and goes, lists of views. See compiled.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from verl_patches.reshard.overlap import part_of
from verl_patches.reshard.region import Region


class Source(Protocol):
    """Where a training rank has (a part of) an HF tensor. `is_view`: whether what `read` returns follows training."""

    region: Region
    is_view: bool

    def read(self, region: Region) -> torch.Tensor:
        """The values of `region`, in its own shape."""


class Destination(Protocol):
    """A region of an HF tensor in the rollout's live memory: `tensor` is a view of vLLM's `parameter`."""

    region: Region
    tensor: torch.Tensor
    parameter: str


class Lent:
    """A tensor whose memory is there between `open` and `close`; made open. Views must be made while it is open."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str):
        self.tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.size_bytes = self.tensor.untyped_storage().nbytes()

    @property
    def is_open(self) -> bool:
        """Whether the memory is there."""
        return self.tensor.untyped_storage().nbytes() == self.size_bytes

    def open(self) -> None:
        """Get the memory, uninitialised."""
        self.tensor.untyped_storage().resize_(self.size_bytes)

    def close(self) -> None:
        """Give the memory back."""
        self.tensor.untyped_storage().resize_(0)


class Copies:
    """Pairs of views, copied by one call; dtypes and strides may differ."""

    def __init__(self) -> None:
        self.to: list[torch.Tensor] = []
        self.source: list[torch.Tensor] = []

    def add(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """One more pair, of equal shape."""
        self.to.append(to)
        self.source.append(source)

    def run(self) -> None:
        """Copy all."""
        if self.to:
            torch._foreach_copy_(self.to, self.source)


@dataclass
class Computed:
    """A source that computes: read whole, once for all the regions of it that one bucket sends."""

    source: Source
    shape: tuple[int, ...]
    parts: list[tuple[Region, torch.Tensor]] = field(default_factory=list)

    def run(self) -> int:
        """Compute and copy; returns the bytes that the result took."""
        value = self.source.read(self.source.region)
        for region, to in self.parts:
            to.copy_(part_of(value, self.source.region, region, self.shape))
        return value.nbytes


@dataclass
class Work:
    """Copies out of sources: of live views, and of computed values (by HF name)."""

    copies: Copies = field(default_factory=Copies)
    computed: dict[str, Computed] = field(default_factory=dict)

    def run(self) -> int:
        """Do it all; returns the most bytes that were held by the way."""
        self.copies.run()
        return max((each.run() for each in self.computed.values()), default=0)


@dataclass
class Scratch:
    """A whole HF tensor put together for vLLM's own load_weights; `local` is what this rank trains of it."""

    region: Region
    memory: Lent
    local: Work = field(default_factory=Work)
    parameter: str = "(whole, for load_weights)"

    @property
    def tensor(self) -> torch.Tensor:
        """The whole tensor."""
        return self.memory.tensor


@dataclass
class Bucket:
    """One exchange: `send` and `receive` are what travels of the wire buffers, splits are bytes by peer.

    `opens` and `closes`: scratch tensors whose first, or last, part comes with this bucket.
    """

    pack: Work
    unpack: Copies
    send: torch.Tensor
    receive: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]
    opens: list[Scratch] = field(default_factory=list)
    closes: list[Scratch] = field(default_factory=list)
