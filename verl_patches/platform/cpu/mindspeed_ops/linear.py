"""Weight gradients added in place (mindspeed/ops/csrc/atb/matmul_add.cpp, groupmatmul_add.cpp)."""

from __future__ import annotations

import torch

from verl_patches.platform.cpu.ascend.ops.checked import builder_op, demand, wide
from verl_patches.platform.cpu.ascend.ops.experts import grouped


@builder_op("npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor C) -> ()")
@torch.no_grad()
def npu_matmul_add_fp32(x, weight, C):
    """C [N, K] += x [M, N] transposed times weight [M, K]; C in fp32."""
    demand(C.dtype == torch.float32, "npu_matmul_add_fp32", f"C must be float32, found {C.dtype}")
    demand(x.dtype == weight.dtype and x.dim() == weight.dim() == 2 and len(x) == len(weight), "npu_matmul_add_fp32",
           f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} must be [M, N] and [M, K]")
    C.add_(wide(x).t() @ wide(weight))


@builder_op("npu_groupmatmul_add_fp32(Tensor x, Tensor weight, Tensor group_list, Tensor grad) -> ()")
@torch.no_grad()
def npu_groupmatmul_add_fp32(x, weight, group_list, grad):
    """grad, read as [E, K, N], += x [M, K] transposed times weight [M, N], group by group (cumulative ends); fp32."""
    op = "npu_groupmatmul_add_fp32"
    demand(grad.dtype == torch.float32, op, f"grad must be float32, found {grad.dtype}")
    made = grouped(op, wide(x).t(), wide(weight), None, group_list, 2, 0)
    demand(grad.numel() == made.numel() and grad.is_contiguous(), op,
           f"grad {list(grad.shape)} must hold {list(made.shape)} without gaps")
    grad.view(made.shape).add_(made)
