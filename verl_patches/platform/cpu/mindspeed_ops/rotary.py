"""Rotary embedding (mindspeed/ops/csrc/cann/npu_rotary_position_embedding.cpp)."""

from __future__ import annotations

from verl_patches.platform.cpu.ascend.ops.checked import builder_op, demand
from verl_patches.platform.cpu.ascend.ops.elementwise import rotate


@builder_op("npu_rotary_position_embedding(Tensor x, Tensor cos, Tensor sin, int mode=0) -> Tensor")
def npu_rotary_position_embedding(x, cos, sin, mode=0):
    """x * cos + rotated x * sin, four dimensions; mode 0 rotates halves, 1 neighbours."""
    demand(mode in (0, 1), "npu_rotary_position_embedding", f"mode must be 0 (half) or 1 (interleaved), found {mode}")
    return rotate("npu_rotary_position_embedding", x, cos, sin, mode == 1)
