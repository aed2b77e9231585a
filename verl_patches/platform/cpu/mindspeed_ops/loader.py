"""`load` of MindSpeed's op builders (mindspeed/op_builder/builder.py:65): plain torch instead of compiled C++.

A builder is known by its name; what it loads is a namespace of the functions that its C++ file declares.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verl_patches.platform.cpu.ascend import not_on_our_paths
from verl_patches.platform.cpu.mindspeed_ops import attention, experts, linear, optimizer, rotary

_GROUPED = SimpleNamespace(
    npu_gmm=experts.npu_gmm,
    npu_gmm_backward=experts.npu_gmm_backward,
    npu_gmm_backward_fusion=experts.npu_gmm_backward_fusion,
)

# name of the builder -> what load() gives
OPS: dict[str, SimpleNamespace] = {
    "grouped_matmul": _GROUPED,
    "grouped_matmul_v2": _GROUPED,
    "npu_apply_fused_adamw_v2": SimpleNamespace(npu_apply_fused_adamw_v2=optimizer.npu_apply_fused_adamw_v2),
    "fusion_attention_v2": SimpleNamespace(
        npu_fusion_attention_v2=attention.npu_fusion_attention_v2,
        npu_fusion_attention_grad_v2=attention.npu_fusion_attention_grad_v2,
    ),
    "npu_groupmatmul_add_fp32": SimpleNamespace(npu_groupmatmul_add_fp32=linear.npu_groupmatmul_add_fp32),
    "npu_matmul_add_fp32": SimpleNamespace(npu_matmul_add_fp32=linear.npu_matmul_add_fp32),
    "npu_moe_token_permute": SimpleNamespace(npu_moe_token_permute=experts.npu_moe_token_permute),
    "npu_moe_token_unpermute": SimpleNamespace(npu_moe_token_unpermute=experts.npu_moe_token_unpermute),
    "npu_ring_attention_update": SimpleNamespace(npu_ring_attention_update=attention.npu_ring_attention_update),
    "npu_rotary_position_embedding": SimpleNamespace(
        npu_rotary_position_embedding=rotary.npu_rotary_position_embedding
    ),
}


def load(self: Any, verbose: bool = True) -> SimpleNamespace:
    """Row provider for the builders' `load`; RuntimeError names the builder and why it has no reference."""
    if self.name in OPS:
        return OPS[self.name]
    builder = type(self).__name__
    reason = not_on_our_paths.BUILDERS.get(builder, f"nothing was seen to load it; add {self.name!r} to {__name__}")
    raise RuntimeError(f"{builder} has no reference for CPU: {reason}")
