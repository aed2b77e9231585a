"""Grouped matrix products and token order (mindspeed/ops/csrc/cann/gmm.cpp, npu_moe_token_(un)permute.cpp)."""

from __future__ import annotations

import torch

from verl_patches.platform.cpu.ascend.ops import experts
from verl_patches.platform.cpu.ascend.ops.checked import builder_op, demand

_GROUPS = ("int[]? group_list", "Tensor? group_list")


def _both(text: str) -> tuple[str, ...]:
    return tuple(text.replace("GROUPS", groups) for groups in _GROUPS)


@builder_op(*_both("npu_gmm(Tensor[] x, Tensor[] weight, Tensor[] bias, GROUPS, int? group_type, int? group_list_type) "
                   "-> Tensor[]"))
@torch.no_grad()
def npu_gmm(x, weight, bias, group_list, group_type, group_list_type, /):
    """[x [M, K] times weight [E, K, N], group by group]; group_type 2: [x [K, M] times weight [M, N], as [E, K, N]].

    A group_list of numbers is always cumulative, as in the C++.
    """
    demand(len(x) == len(weight) == 1 and len(bias) <= 1, "npu_gmm", "x, weight and bias hold one tensor each")
    kind = group_list_type or 0 if isinstance(group_list, torch.Tensor) else 0
    return [experts.grouped("npu_gmm", x[0], weight[0], bias[0] if bias else None, group_list, group_type, kind)]


@builder_op(*_both("npu_gmm_backward(Tensor[] grad, Tensor[] x, Tensor[] weight, GROUPS, int? group_list_type) -> "
                   "(Tensor[], Tensor[], Tensor[])"))
def npu_gmm_backward(grad, x, weight, group_list, group_list_type, /):
    """([gradient of x], [gradient of weight], []) of npu_gmm with group_type 0."""
    dx, _, _ = npu_gmm_backward_fusion(grad, weight, group_list, group_list_type)
    dw = npu_gmm([x[0].t()], [grad[0]], [], group_list, 2, group_list_type)
    return dx, [dw[0].reshape(weight[0].shape)], []


@builder_op(*_both("npu_gmm_backward_fusion(Tensor[] grad, Tensor[] weight, GROUPS, int? group_list_type) -> "
                   "(Tensor[], Tensor[], Tensor[])"))
def npu_gmm_backward_fusion(grad, weight, group_list, group_list_type, /):
    """([gradient of x], [], []): that of weight is added to main_grad by npu_groupmatmul_add_fp32."""
    return npu_gmm([grad[0]], [weight[0].transpose(-1, -2)], [], group_list, 0, group_list_type), [], []


@builder_op("npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=0, bool? padded_mode=False) -> "
            "Tensor[]")
def npu_moe_token_permute(tokens, indices, num_out_tokens=0, padded_mode=False):
    """[rows in the order of their experts, places]; as torch_npu's."""
    return list(experts.permute("npu_moe_token_permute", tokens, indices, num_out_tokens or 0, padded_mode))


@builder_op("npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
            "bool? padded_mode=False, int[]? restore_shape=None) -> Tensor")
def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    """The way back; as torch_npu's."""
    return experts.unpermute("npu_moe_token_unpermute", permuted_tokens, sorted_indices, probs, padded_mode)
