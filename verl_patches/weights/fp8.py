"""Decode FP8 weights with block scales, as DeepSeek publishes them, to bf16 or fp32, and encode from either.

A weight [R, C] in float8_e4m3fn has an fp32 scale for each block of 128 x 128, in a tensor `weight_scale_inv` of shape
[ceil(R / 128), ceil(C / 128)]; blocks at the lower and right edge may be smaller. value = fp8 * scale, computed in
fp32 and rounded once (`weight_dequant` in inference/kernel.py of deepseek-ai/DeepSeek-V3). Encoding follows `act_quant`
there: scale = max |value| of the block / 448, the largest e4m3fn; a block of zeros, where that is 0 / 0, has scale 1.
NaN, and scales that a block of finite values cannot have (NaN, infinity, 0, negative ones), are refused both ways.

torch on a CPU converts fp8 one element at a time. The bits of an e4m3fn, moved by 7 places, are those of an fp16 of
1/256 of the value, so shifts and torch's vectorised conversion of fp16 do it several times faster, and exactly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl_patches.errors import RecipeError

LARGEST = 448.0  # the largest float8_e4m3fn
LARGEST_SCALE = torch.finfo(torch.bfloat16).max / LARGEST  # with it every value is finite in bf16
_STEP_ELEMENTS = 1 << 17  # elements decoded at a time, so that intermediate values stay in a core's cache


def require_scales(scales: torch.Tensor, name: str) -> None:
    """Raise RecipeError unless every scale [rows, columns] is above 0 and at most LARGEST_SCALE."""
    good = (scales > 0) & (scales <= LARGEST_SCALE)  # false for NaN
    if not good.all():
        row, column = (~good).nonzero()[0].tolist()
        raise RecipeError(
            f"{name}: the scale of block [{row}, {column}] is {scales[row, column].item()}; expected one above 0 and "
            f"at most {LARGEST_SCALE:.3g}: the weights are damaged; download or write the folder again"
        )


def decode(
    stored: torch.Tensor, scales: torch.Tensor, block: Sequence[int], dtype: torch.dtype, name: str = "tensor"
) -> torch.Tensor:
    """Return the values in `dtype` of `stored` [R, C] in fp8, whose first row begins a block, with its `scales`.

    Raises RecipeError for NaN; scales are not checked here (`require_scales`).
    """
    (rows, columns), width = block, stored.shape[1]
    out, numbers = torch.empty(stored.shape, dtype=dtype), stored.view(torch.int8)
    if numbers.amax() == 127 or stored.view(torch.uint8).amax() == 255:  # 0x7f, 0xff: NaN, finite as fp16
        raise RecipeError(f"{name}: holds NaN: the weights are damaged; download or write the folder again")
    step = max(1, min(rows, _STEP_ELEMENTS // width))
    bits, values = torch.empty(step, width, dtype=torch.int16), torch.empty(step, width)
    for first in range(0, len(stored), rows):
        scale = scales[first // rows].repeat_interleave(columns)[:width]
        for start in range(first, min(first + rows, len(stored)), step):
            stop = min(start + step, first + rows, len(stored))
            value = values[: stop - start]
            half = bits[: stop - start].copy_(numbers[start:stop])
            half.bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign was extended to both upper bits
            out[start:stop] = value.copy_(half.view(torch.float16)).mul_(scale * 256)
    return out


def encode(values: torch.Tensor, block: Sequence[int], name: str = "tensor") -> tuple[torch.Tensor, torch.Tensor]:
    """Return (fp8 [R, C], fp32 scales [ceil(R / rows), ceil(C / columns)]) of `values` [R, C]; refuses NaN, inf."""
    (rows, columns), width = block, values.shape[1]
    count = -(-width // columns)
    stored = torch.empty(values.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-len(values) // rows), count, dtype=torch.float32)
    wide = torch.empty(min(rows, len(values)), width)
    for number, start in enumerate(range(0, len(values), rows)):
        band = wide[: len(values) - start].copy_(values[start : start + rows])
        largest = torch.maximum(band.amax(0), -band.amin(0))  # the largest absolute value, faster than by abs()
        peak = torch.nn.functional.pad(largest, (0, count * columns - width)).view(count, columns)
        scale = peak.amax(1) / LARGEST
        if not (scale <= LARGEST_SCALE).all():  # false for NaN
            raise RecipeError(f"{name}: rows from {start} hold NaN or infinity, which FP8 cannot store; check the run")
        scale[scale == 0] = 1.0
        band.div_(scale.repeat_interleave(columns)[:width]).clamp_(-LARGEST, LARGEST)
        stored[start : start + rows] = band
        scales[number] = scale
    return stored, scales
