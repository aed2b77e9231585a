"""Decode FP8 weights with block scales, as DeepSeek publishes them, to bf16 or fp32.

A weight [R, C] in float8_e4m3fn has an fp32 scale for each block of 128 x 128, in a tensor `weight_scale_inv` of shape
[ceil(R / 128), ceil(C / 128)]; blocks at the lower and right edge may be smaller. value = fp8 * scale, computed in
fp32 and rounded once (`weight_dequant` in inference/kernel.py of deepseek-ai/DeepSeek-V3). NaN, and scales that a block
of finite values cannot have (NaN, infinity, 0, negative ones), are refused.

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
