"""One number for a part of an HF tensor, equal wherever and in whatever pieces the same values lie."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_patches.reshard.region import Region

_CHUNK = 1 << 22  # elements at a time: int64 copies stay below 100 MB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # odd constants; products wrap around at 64 bits


def checksum(tensor: torch.Tensor, region: Region, shape: Sequence[int]) -> torch.Tensor:
    """Sum modulo 2**64 of the raw values, each times an odd number of its place in the HF tensor: int64 scalar.

    `tensor`: values of `region` of the HF tensor of `shape`, with any strides. Because places count, a swap or a
    transposition changes the sum; sums of parts of one region add up to that of the region.
    """
    values = tensor.detach()
    first = [region.start if dim == region.axis else 0 for dim in range(len(shape))]
    if values.dim() == 1:
        values, first, shape = values[:, None], [*first, 0], [*shape, 1]
    rows, columns = values.shape
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    column = torch.arange(first[1], first[1] + columns, device=values.device)
    step = max(1, _CHUNK // max(1, columns))
    for start in range(0, rows, step):
        part = values[start : start + step].contiguous()
        raw = part.view(_INTEGERS[part.element_size()]).to(torch.int64)
        row = torch.arange(first[0] + start, first[0] + start + len(part), device=values.device)
        place = row[:, None] * shape[1] + column
        total += (raw * _odd(place)).sum()
    return total


def count_nan(tensor: torch.Tensor) -> torch.Tensor:
    """How many elements are not a number: int64 scalar; 0 for integers."""
    if not tensor.is_floating_point():
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    return (tensor.detach() != tensor.detach()).sum()


def _odd(place: torch.Tensor) -> torch.Tensor:
    mixed = place * _MIX[0]
    mixed = (mixed ^ (mixed >> 29)) * _MIX[1]
    return (mixed ^ (mixed >> 32)) | 1
