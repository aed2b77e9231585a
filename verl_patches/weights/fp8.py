"""FP8 weights with block scales as DeepSeek publishes them: decode to bf16 or fp32, encode from either.

A weight [R, C] in float8_e4m3fn has an fp32 scale for each block of 128 x 128, in a tensor `weight_scale_inv` of shape
[ceil(R / 128), ceil(C / 128)]; blocks at the lower and right edge may be smaller. value = fp8 * scale, computed in
fp32 and rounded once (`weight_dequant` in inference/kernel.py of deepseek-ai/DeepSeek-V3). Encoding follows `act_quant`
there: scale = max |value| of the block / 448, the largest e4m3fn; a block of zeros, where that is 0 / 0, has scale 1.

torch on a CPU converts fp8 one element at a time; a table of all pairs of bytes is several times faster and exact.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy
import torch

from verl_patches.errors import RecipeError

LARGEST = 448.0  # of float8_e4m3fn


@functools.cache
def _pairs() -> numpy.ndarray:
    """Two neighbouring bytes, as a little-endian number -> the two fp32 values, as one number of 8 bytes."""
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    table = numpy.empty((256, 256, 2), numpy.float32)
    table[:, :, 0], table[:, :, 1] = values[None, :], values[:, None]  # [second byte, first byte]
    return table.reshape(65536, 2).view(numpy.float64)[:, 0]


def _values(stored: torch.Tensor, buffer: numpy.ndarray) -> torch.Tensor:
    """fp32 values of a contiguous fp8 tensor, in `buffer` of at least half as many numbers of 8 bytes."""
    if stored.numel() % 2:
        return stored.float()
    pairs = stored.view(torch.uint8).reshape(-1).numpy().view("<u2")
    values = numpy.take(_pairs(), pairs, out=buffer[: pairs.size], mode="clip")  # clip: without a copy of `out`
    return torch.from_numpy(values.view(numpy.float32)).view(stored.shape)


def decode(stored: torch.Tensor, scales: torch.Tensor, block: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Values in `dtype` of `stored` [R, C] in fp8, rows from the start of a block on, with `scales` of its blocks."""
    rows, columns = block
    out = torch.empty(stored.shape, dtype=dtype)
    buffer = numpy.empty(min(rows, stored.shape[0]) * stored.shape[1] // 2, numpy.float64)
    for number, start in enumerate(range(0, stored.shape[0], rows)):
        scale = scales[number].repeat_interleave(columns)[: stored.shape[1]]
        out[start : start + rows] = _values(stored[start : start + rows], buffer).mul_(scale)
    return out


def encode(values: torch.Tensor, block: Sequence[int], name: str = "tensor") -> tuple[torch.Tensor, torch.Tensor]:
    """(fp8 [R, C], scales [ceil(R / rows), ceil(C / columns)] in fp32) of `values` [R, C]; RecipeError for NaN, inf."""
    rows, columns = block
    count = -(-values.shape[1] // columns)
    stored = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-values.shape[0] // rows), count, dtype=torch.float32)
    for number, start in enumerate(range(0, values.shape[0], rows)):
        band = values[start : start + rows].float()
        largest = torch.maximum(band.amax(0), -band.amin(0))  # of the absolute values, several times faster
        peak = torch.nn.functional.pad(largest, (0, count * columns - band.shape[1])).view(count, columns)
        scale = peak.amax(1) / LARGEST
        if not scale.isfinite().all():
            raise RecipeError(f"{name}: rows from {start} hold NaN or infinity, which FP8 cannot store; check the run")
        scale[scale == 0] = 1.0
        wide = scale.repeat_interleave(columns)[: band.shape[1]]
        stored[start : start + rows] = (band / wide).clamp_(-LARGEST, LARGEST)
        scales[number] = scale
    return stored, scales
