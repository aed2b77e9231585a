"""What MindSpeed's op builders load (mindspeed/op_builder/builder.py:65): plain torch instead of compiled C++.

A builder is known by its name; what it loads is a namespace of the functions that its C++ file (mindspeed/ops/csrc)
declares: cann/fusion_attention_v2.cpp, cann/npu_ring_attention_update.cpp, cann/gmm.cpp,
cann/npu_moe_token_(un)permute.cpp, atb/matmul_add.cpp, atb/groupmatmul_add.cpp, cann/npu_apply_fused_adamw_v2.cpp,
cann/npu_rotary_position_embedding.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from verl_patches.platform.cpu.ascend import experts, missing
from verl_patches.platform.cpu.ascend.attention import Call, attend, attend_backward
from verl_patches.platform.cpu.ascend.checked import builder_op, demand, wide
from verl_patches.platform.cpu.ascend.elementwise import adam_w, rotate


@builder_op(
    "npu_fusion_attention_v2(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, Tensor? "
    "pse_opt, Tensor? padding_mask_opt, Tensor? atten_mask_opt, float scale, float keep_prob, int pre_tokens, "
    "int next_tokens, int inner_precise, int[]? prefix_opt, int[]? actual_seq_qlen, int[]? actual_seq_kvlen, "
    "int sparse_mode, bool gen_mask_parallel, bool sync, int pse_type, int[]? q_start_idx, int[]? "
    "kv_start_idx) -> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)
@torch.no_grad()
def npu_fusion_attention_v2(
    query,
    key,
    value,
    head_num,
    input_layout,
    pse_opt,
    padding_mask_opt,
    atten_mask_opt,
    scale,
    keep_prob,
    pre_tokens,
    next_tokens,
    inner_precise,
    prefix_opt,
    actual_seq_qlen,
    actual_seq_kvlen,
    sparse_mode,
    gen_mask_parallel,
    sync,
    pse_type,
    q_start_idx,
    kv_start_idx,
    /,
):
    """The seven outputs of torch_npu's npu_fusion_attention; pse_type 0 adds pse after scaling, 1 before."""
    call = Call(
        "npu_fusion_attention_v2",
        head_num,
        input_layout.upper(),
        scale,
        sparse_mode,
        pre_tokens,
        next_tokens,
        atten_mask_opt,
        pse_opt,
        pse_type,
        actual_seq_qlen,
        actual_seq_kvlen,
    )
    return attend(call.check(query, key, value, keep_prob, padding_mask_opt, prefix_opt), query, key, value)


@builder_op(
    "npu_fusion_attention_grad_v2(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num, str "
    "input_layout, Tensor? pse, Tensor? padding_mask, Tensor? atten_mask, Tensor? softmax_max, Tensor? "
    "softmax_sum, Tensor? softmax_in, Tensor? attention_in, float scale_value, float keep_prob, int "
    "pre_tokens, int next_tokens, int inner_precise, int seed, int offset, int numels, int[]? prefix, int[]? "
    "actual_seq_qlen, int[]? actual_seq_kvlen, int sparse_mode, bool gen_mask_parallel, bool sync, int "
    "pse_type, int[]? q_start_idx, int[]? kv_start_idx) -> (Tensor, Tensor, Tensor, Tensor)"
)
def npu_fusion_attention_grad_v2(
    query,
    key,
    value,
    dy,
    head_num,
    input_layout,
    pse,
    padding_mask,
    atten_mask,
    softmax_max,
    softmax_sum,
    softmax_in,
    attention_in,
    scale_value,
    keep_prob,
    pre_tokens,
    next_tokens,
    inner_precise,
    seed,
    offset,
    numels,
    prefix,
    actual_seq_qlen,
    actual_seq_kvlen,
    sparse_mode,
    gen_mask_parallel,
    sync,
    pse_type,
    q_start_idx,
    kv_start_idx,
    /,
):
    """(dq, dk, dv, dpse), the last None without pse."""
    call = Call(
        "npu_fusion_attention_grad_v2",
        head_num,
        input_layout.upper(),
        scale_value,
        sparse_mode,
        pre_tokens,
        next_tokens,
        atten_mask,
        pse,
        pse_type,
        actual_seq_qlen,
        actual_seq_kvlen,
    )
    call.check(query, key, value, keep_prob, padding_mask, prefix)
    *grads, d_pse = attend_backward(call, query, key, value, dy, softmax_max, softmax_sum, attention_in)
    return (*grads, None if pse is None else d_pse)


@builder_op(
    "npu_ring_attention_update(Tensor prev_attn_out, Tensor prev_softmax_max, Tensor prev_softmax_sum, Tensor "
    "cur_attn_out, Tensor cur_softmax_max, Tensor cur_softmax_sum, Tensor? actual_seq_qlen=None, "
    "str? layout='SBH') -> Tensor[]"
)
@torch.no_grad()
def npu_ring_attention_update(
    prev_attn_out,
    prev_softmax_max,
    prev_softmax_sum,
    cur_attn_out,
    cur_softmax_max,
    cur_softmax_sum,
    actual_seq_qlen=None,
    layout="SBH",
):
    """[attention, maximum, sum] over the keys of both parts; attention [S, B, H], statistics [B, N, S, 8]."""
    demand(layout in (None, "SBH"), "npu_ring_attention_update", f"layout {layout!r} is not part of the reference")
    top = torch.maximum(prev_softmax_max, cur_softmax_max)
    before, now = (
        part * (best - top).exp()
        for part, best in ((prev_softmax_sum, prev_softmax_max), (cur_softmax_sum, cur_softmax_max))
    )
    total = before + now
    heads = top.shape[1]
    weights = (w[..., :1].permute(2, 0, 1, 3) for w in (before / total, now / total))
    parts = (wide(x).unflatten(-1, (heads, -1)) for x in (prev_attn_out, cur_attn_out))
    out = sum(w * x for w, x in zip(weights, parts, strict=True)).flatten(-2)
    return [out.to(prev_attn_out.dtype), top, total]


_GROUPS = ("int[]? group_list", "Tensor? group_list")


def _both(text: str) -> tuple[str, ...]:
    return tuple(text.replace("GROUPS", groups) for groups in _GROUPS)


@builder_op(
    *_both(
        "npu_gmm(Tensor[] x, Tensor[] weight, Tensor[] bias, GROUPS, int? group_type, int? group_list_type) -> Tensor[]"
    )
)
@torch.no_grad()
def npu_gmm(x, weight, bias, group_list, group_type, group_list_type, /):
    """[x [M, K] times weight [E, K, N], group by group]; group_type 2: [x [K, M] times weight [M, N], as [E, K, N]].

    A group_list of numbers is always cumulative, as in the C++.
    """
    demand(len(x) == len(weight) == 1 and len(bias) <= 1, "npu_gmm", "x, weight and bias hold one tensor each")
    kind = group_list_type or 0 if isinstance(group_list, torch.Tensor) else 0
    return [experts.grouped("npu_gmm", x[0], weight[0], bias[0] if bias else None, group_list, group_type, kind)]


@builder_op(
    *_both(
        "npu_gmm_backward(Tensor[] grad, Tensor[] x, Tensor[] weight, GROUPS, int? group_list_type) -> "
        "(Tensor[], Tensor[], Tensor[])"
    )
)
def npu_gmm_backward(grad, x, weight, group_list, group_list_type, /):
    """([gradient of x], [gradient of weight], []) of npu_gmm with group_type 0."""
    dx, _, _ = npu_gmm_backward_fusion(grad, weight, group_list, group_list_type)
    dw = npu_gmm([x[0].t()], [grad[0]], [], group_list, 2, group_list_type)
    return dx, [dw[0].reshape(weight[0].shape)], []


@builder_op(
    *_both(
        "npu_gmm_backward_fusion(Tensor[] grad, Tensor[] weight, GROUPS, int? group_list_type) -> "
        "(Tensor[], Tensor[], Tensor[])"
    )
)
def npu_gmm_backward_fusion(grad, weight, group_list, group_list_type, /):
    """([gradient of x], [], []): that of weight is added to main_grad by npu_groupmatmul_add_fp32."""
    return npu_gmm([grad[0]], [weight[0].transpose(-1, -2)], [], group_list, 0, group_list_type), [], []


@builder_op(
    "npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=0, bool? padded_mode=False) -> Tensor[]"
)
def npu_moe_token_permute(tokens, indices, num_out_tokens=0, padded_mode=False):
    """[rows in the order of their experts, places]; as torch_npu's."""
    return list(experts.permute("npu_moe_token_permute", tokens, indices, num_out_tokens or 0, padded_mode))


@builder_op(
    "npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
    "bool? padded_mode=False, int[]? restore_shape=None) -> Tensor"
)
def npu_moe_token_unpermute(permuted_tokens, sorted_indices, probs=None, padded_mode=False, restore_shape=None):
    """The way back; as torch_npu's."""
    return experts.unpermute("npu_moe_token_unpermute", permuted_tokens, sorted_indices, probs, padded_mode)


@builder_op("npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor C) -> ()")
@torch.no_grad()
def npu_matmul_add_fp32(x, weight, C):
    """C [N, K] += x [M, N] transposed times weight [M, K]; C in fp32."""
    demand(C.dtype == torch.float32, "npu_matmul_add_fp32", f"C must be float32, found {C.dtype}")
    demand(
        x.dtype == weight.dtype and x.dim() == weight.dim() == 2 and len(x) == len(weight),
        "npu_matmul_add_fp32",
        f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} must be [M, N] and [M, K]",
    )
    C.add_(wide(x).t() @ wide(weight))


@builder_op("npu_groupmatmul_add_fp32(Tensor x, Tensor weight, Tensor group_list, Tensor grad) -> ()")
@torch.no_grad()
def npu_groupmatmul_add_fp32(x, weight, group_list, grad):
    """grad, read as [E, K, N], += x [M, K] transposed times weight [M, N], group by group (cumulative ends); fp32."""
    op = "npu_groupmatmul_add_fp32"
    demand(grad.dtype == torch.float32, op, f"grad must be float32, found {grad.dtype}")
    made = experts.grouped(op, wide(x).t(), wide(weight), None, group_list, 2, 0)
    demand(
        grad.numel() == made.numel() and grad.is_contiguous(),
        op,
        f"grad {list(grad.shape)} must hold {list(made.shape)} without gaps",
    )
    grad.view(made.shape).add_(made)


@builder_op(
    "npu_apply_fused_adamw_v2(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor "
    "max_exp_avg_sq, Tensor state_step, float lr, float beta1, float beta2, float weight_decay, float eps, "
    "bool amsgrad, bool maximize) -> ()"
)
def npu_apply_fused_adamw_v2(
    param,
    grad,
    exp_avg,
    exp_avg_sq,
    max_exp_avg_sq,
    state_step,
    lr,
    beta1,
    beta2,
    weight_decay,
    eps,
    amsgrad,
    maximize,
    /,
):
    """AdamW step number state_step (one number, 1 first), in place; max_exp_avg_sq counts with amsgrad only."""
    demand(
        state_step.numel() == 1,
        "npu_apply_fused_adamw_v2",
        f"state_step must be one number, found {list(state_step.shape)}",
    )
    step = int(state_step)
    demand(step >= 1, "npu_apply_fused_adamw_v2", f"the first step is 1, found {step}")
    adam_w(
        param,
        exp_avg,
        exp_avg_sq,
        grad,
        max_exp_avg_sq if amsgrad else None,
        lr,
        beta1,
        beta2,
        beta1**step,
        beta2**step,
        weight_decay,
        eps,
        maximize,
    )


@builder_op("npu_rotary_position_embedding(Tensor x, Tensor cos, Tensor sin, int mode=0) -> Tensor")
def npu_rotary_position_embedding(x, cos, sin, mode=0):
    """x * cos + rotated x * sin, four dimensions; mode 0 rotates halves, 1 neighbours."""
    demand(mode in (0, 1), "npu_rotary_position_embedding", f"mode must be 0 (half) or 1 (interleaved), found {mode}")
    return rotate("npu_rotary_position_embedding", x, cos, sin, mode == 1)


def _namespace(*functions: Callable) -> SimpleNamespace:
    return SimpleNamespace(**{function.__name__: function for function in functions})


_GROUPED = _namespace(npu_gmm, npu_gmm_backward, npu_gmm_backward_fusion)
# name of the builder -> what load() gives
OPS: dict[str, SimpleNamespace] = {
    "grouped_matmul": _GROUPED,
    "grouped_matmul_v2": _GROUPED,
    "npu_apply_fused_adamw_v2": _namespace(npu_apply_fused_adamw_v2),
    "fusion_attention_v2": _namespace(npu_fusion_attention_v2, npu_fusion_attention_grad_v2),
    "npu_groupmatmul_add_fp32": _namespace(npu_groupmatmul_add_fp32),
    "npu_matmul_add_fp32": _namespace(npu_matmul_add_fp32),
    "npu_moe_token_permute": _namespace(npu_moe_token_permute),
    "npu_moe_token_unpermute": _namespace(npu_moe_token_unpermute),
    "npu_ring_attention_update": _namespace(npu_ring_attention_update),
    "npu_rotary_position_embedding": _namespace(npu_rotary_position_embedding),
}


def load(self: Any, verbose: bool = True) -> SimpleNamespace:
    """Row provider for the builders' `load`; RuntimeError names the builder and why it has no reference."""
    if self.name in OPS:
        return OPS[self.name]
    builder = type(self).__name__
    reason = missing.BUILDERS.get(builder, f"nothing was seen to load it; add {self.name!r} to {__name__}")
    raise RuntimeError(f"{builder} has no reference for CPU: {reason}")
