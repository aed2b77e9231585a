"""Stands for `torch_npu` 2.5.1.post1: the functions that are called on our paths, as plain-torch references."""

from verl_patches.platform.cpu.ascend.missing import refuse_unknown
from verl_patches.platform.cpu.ascend.ops.attention import npu_fusion_attention, npu_fusion_attention_grad
from verl_patches.platform.cpu.ascend.ops.elementwise import (
    npu_confusion_transpose,
    npu_dtype_cast,
    npu_format_cast,
    npu_rms_norm,
    npu_rotary_mul,
    npu_scaled_masked_softmax,
    npu_swiglu,
    npu_swiglu_backward,
)
from verl_patches.platform.cpu.ascend.ops.experts import (
    npu_grouped_matmul,
    npu_moe_gating_top_k,
    npu_moe_gating_top_k_softmax,
    npu_moe_token_permute,
    npu_moe_token_unpermute,
)
from verl_patches.platform.cpu.ascend.ops.optimizer import npu_apply_adam_w
from verl_patches.platform.cpu.ascend.torch_npu import _C, npu
from verl_patches.platform.npu_schemas.reader import VERSION

__all__ = [
    "VERSION", "_C", "npu", "npu_apply_adam_w", "npu_confusion_transpose", "npu_dtype_cast", "npu_format_cast",
    "npu_fusion_attention", "npu_fusion_attention_grad", "npu_grouped_matmul", "npu_moe_gating_top_k",
    "npu_moe_gating_top_k_softmax", "npu_moe_token_permute", "npu_moe_token_unpermute", "npu_rms_norm",
    "npu_rotary_mul", "npu_scaled_masked_softmax", "npu_swiglu", "npu_swiglu_backward",
]  # fmt: skip
__version__ = VERSION
__getattr__ = refuse_unknown(__name__)
