"""Implement the ops that mindspeed.op_builder.builder.MindSpeedOpBuilder.load compiles from C++ in plain torch.

A builder is known by its name; it loads a namespace of the functions that its C++ file (mindspeed/ops/csrc) declares:
cann/gmm.cpp, cann/npu_moe_token_(un)permute.cpp, atb/matmul_add.cpp, atb/groupmatmul_add.cpp,
cann/npu_apply_fused_adamw_v2.cpp, cann/npu_rotary_position_embedding.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from verl_patches.emulation.op_schemas import builder_op
from verl_patches.reference import demand, experts, layers, to_fp32


def _grouped_op(text: str) -> Callable[[Callable], Callable]:
    """Return the `builder_op` of both overloads of schema `text`, in which GROUPS stands for the list of groups."""
    groups = "int[]? group_list", "Tensor? group_list"
    return builder_op(*(text.replace("GROUPS", kind) for kind in groups), by_position=True)


@_grouped_op(
    "npu_gmm(Tensor[] x, Tensor[] weight, Tensor[] bias, GROUPS, int? group_type, int? group_list_type) -> Tensor[]"
)
def npu_gmm(x, weight, bias, group_list, group_type, group_list_type):
    """Multiply x [M, K] by weight [E, K, N], group by group; return one tensor in a list.

    With group_type 2, x [K, M] times weight [M, N] gives [E, K, N]. A group_list of numbers is always cumulative, as in
    the C++.
    """
    demand(len(x) == len(weight) == 1 and not bias, "x and weight must hold one tensor each, and bias none")
    return [_products(x[0], weight[0], group_list, group_type, group_list_type)]


@torch.no_grad()
def _products(x, weight, group_list, group_type, group_list_type):
    kind = group_list_type if isinstance(group_list, torch.Tensor) else 0
    return experts.grouped_matmul(x, weight, group_list, group_type, kind or 0)


@_grouped_op(
    "npu_gmm_backward(Tensor[] grad, Tensor[] x, Tensor[] weight, GROUPS, int? group_list_type) -> "
    "(Tensor[], Tensor[], Tensor[])"
)
def npu_gmm_backward(grad, x, weight, group_list, group_list_type):
    """Return ([gradient of x], [gradient of weight], []) of npu_gmm with group_type 0."""
    dx = _products(grad[0], weight[0].transpose(-1, -2), group_list, 0, group_list_type)
    dw = _products(x[0].t(), grad[0], group_list, 2, group_list_type)
    return [dx], [dw.reshape(weight[0].shape)], []


@_grouped_op(
    "npu_gmm_backward_fusion(Tensor[] grad, Tensor[] weight, GROUPS, int? group_list_type) -> "
    "(Tensor[], Tensor[], Tensor[])"
)
def npu_gmm_backward_fusion(grad, weight, group_list, group_list_type):
    """Return ([gradient of x], [], []); npu_groupmatmul_add_fp32 adds the weight's gradient to main_grad."""
    return [_products(grad[0], weight[0].transpose(-1, -2), group_list, 0, group_list_type)], [], []


@builder_op(
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=0, bool? padded_mode=False) -> Tensor[]"
)
def npu_moe_token_permute(padded_mode, **given):
    """Return [rows in the order of their experts, places], as torch_npu's function of this name."""
    return list(experts.npu_moe_token_permute(**given, padded_mode=bool(padded_mode)))


@builder_op(
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool? padded_mode=False, int[]? restore_shape=None) -> Tensor"
)
def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs, padded_mode):
    """Return rows to the order of their tokens, as torch_npu's function of this name."""
    return experts.npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs, bool(padded_mode))


@builder_op("npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor C) -> ()")
@torch.no_grad()
def npu_matmul_add_fp32(x, weight, C):
    """Add x [M, N] transposed times weight [M, K] to C [N, K], in place; C is fp32."""
    demand(C.dtype == torch.float32, f"C must be float32, found {C.dtype}")
    found = f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype}"
    fits = x.dtype == weight.dtype and x.dim() == weight.dim() == 2 and len(x) == len(weight)
    demand(fits, f"expected [M, N] and [M, K] of one dtype, found {found}")
    C.add_(to_fp32(x).t() @ to_fp32(weight))


@builder_op("npu_groupmatmul_add_fp32(Tensor x, Tensor weight, Tensor group_list, Tensor grad) -> ()")
@torch.no_grad()
def npu_groupmatmul_add_fp32(x, weight, group_list, grad):
    """Add x [M, K] transposed times weight [M, N], group by group, to fp32 grad, read as [E, K, N], in place.

    group_list holds the cumulative ends of the groups.
    """
    demand(grad.dtype == torch.float32, f"grad must be float32, found {grad.dtype}")
    made = experts.grouped_matmul(to_fp32(x).t(), to_fp32(weight), group_list, 2, 0)
    fits = grad.numel() == made.numel() and grad.is_contiguous()
    demand(fits, f"grad {list(grad.shape)} must hold {list(made.shape)} without gaps")
    grad.view(made.shape).add_(made)


@builder_op(
    "npu_apply_fused_adamw_v2(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor "
    "max_exp_avg_sq, Tensor state_step, float lr, float beta1, float beta2, float weight_decay, float eps, "
    "bool amsgrad, bool maximize) -> ()",
    by_position=True,
)
def npu_apply_fused_adamw_v2(state_step, beta1, beta2, max_exp_avg_sq, amsgrad, maximize, **given):
    """Make AdamW step state_step (one number, the first is 1) in place; max_exp_avg_sq is for amsgrad only."""
    demand(not amsgrad and not maximize, "amsgrad and maximize must be False: the reference does not support them")
    demand(state_step.numel() == 1, f"state_step must be one number, found {list(state_step.shape)}")
    step = int(state_step)
    demand(step >= 1, f"state_step must be at least 1, found {step}")
    layers.adam_w(betas=(beta1, beta2), powers=(beta1**step, beta2**step), **given)


@builder_op("npu_rotary_position_embedding(Tensor x, Tensor cos, Tensor sin, int mode=0) -> Tensor")
def npu_rotary_position_embedding(x, cos, sin, mode):
    """Return x * cos + rotated x * sin of four dimensions; mode 0 rotates halves, 1 neighbours."""
    demand(mode in (0, 1), f"mode must be 0 (half) or 1 (interleaved), found {mode}")
    return layers.rotate(x, cos, sin, mode == 1)


def _namespace(*functions: Callable) -> SimpleNamespace:
    return SimpleNamespace(**{function.__name__: function for function in functions})


_GMM_OPS = _namespace(npu_gmm, npu_gmm_backward, npu_gmm_backward_fusion)
_SINGLE_OPS = (
    npu_apply_fused_adamw_v2, npu_groupmatmul_add_fp32, npu_matmul_add_fp32, npu_moe_token_permute,
    npu_moe_token_unpermute, npu_rotary_position_embedding,
)  # fmt: skip
# name of a builder -> the namespace that load() returns
OPS: dict[str, SimpleNamespace] = {
    "grouped_matmul": _GMM_OPS,
    "grouped_matmul_v2": _GMM_OPS,
    **{function.__name__: _namespace(function) for function in _SINGLE_OPS},
}


def load(self: Any, verbose: bool = True) -> SimpleNamespace:
    """Replace the builders' `load`; raise RuntimeError for a builder that DeepSeek-V3's training never loads."""
    if self.name not in OPS:
        raise RuntimeError(f"{type(self).__name__} {self.name!r} has no CPU reference; add it to {__name__}")
    return OPS[self.name]
