"""Test FP8 against the format's definition, written out here; test_convert.py tests blocks and their scales."""

import numpy
import pytest
import torch

from verl_patches.errors import RecipeError
from verl_patches.weights import fp8

BLOCK = (128, 128)


def e4m3_value(byte):
    """Return an e4m3fn value: sign, 4 bits of exponent (bias 7), 3 of mantissa; no infinity, 0x7f is NaN."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    size = mantissa / 8 * 2**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return float("nan") if byte & 127 == 127 else -size if sign else size


VALUES = numpy.array([e4m3_value(byte) for byte in range(256)])


def test_every_byte_has_its_value_and_nan_is_refused():
    values = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    stored, scales = values.repeat(128, 1), torch.ones(1, 2)
    found = fp8.decode(stored.view(torch.float8_e4m3fn), scales, BLOCK, torch.float32)
    assert numpy.array_equal(found.double().numpy(), numpy.tile(VALUES[values.numpy()], (128, 1)))
    for nan in (0x7F, 0xFF):
        stored[77, 9] = nan
        with pytest.raises(RecipeError, match="w.weight: holds NaN"):
            fp8.decode(stored.view(torch.float8_e4m3fn), scales, BLOCK, torch.bfloat16, "w.weight")


@pytest.mark.parametrize("scale", [torch.nan, torch.inf, -torch.inf, 0.0, -0.0, -1.0, 1e36])
def test_a_scale_that_no_finite_block_has_is_refused(scale):
    scales = torch.full((3, 2), 1e-45)
    scales[0, 1] = fp8.LARGEST_SCALE
    fp8.require_scales(scales, "w")  # control: these scales are accepted
    assert (scales * fp8.LARGEST).bfloat16().isfinite().all()
    scales[2, 1] = scale
    with pytest.raises(RecipeError, match=r"w: the scale of block \[2, 1\] is "):
        fp8.require_scales(scales, "w")
