"""AdamW of the swap optimizer (mindspeed/ops/csrc/cann/npu_apply_fused_adamw_v2.cpp)."""

from __future__ import annotations

from verl_patches.platform.cpu.ascend.ops.checked import builder_op, demand
from verl_patches.platform.cpu.ascend.ops.optimizer import adam_w


@builder_op("npu_apply_fused_adamw_v2(Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor "
            "max_exp_avg_sq, Tensor state_step, float lr, float beta1, float beta2, float weight_decay, float eps, "
            "bool amsgrad, bool maximize) -> ()")
def npu_apply_fused_adamw_v2(param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, state_step, lr, beta1, beta2,
                             weight_decay, eps, amsgrad, maximize, /):
    """AdamW step number state_step (one number, 1 first), in place; max_exp_avg_sq counts with amsgrad only."""
    demand(state_step.numel() == 1, "npu_apply_fused_adamw_v2", f"state_step must be one number, found "
           f"{list(state_step.shape)}")
    step = int(state_step)
    demand(step >= 1, "npu_apply_fused_adamw_v2", f"the first step is 1, found {step}")
    adam_w(param, exp_avg, exp_avg_sq, grad, max_exp_avg_sq if amsgrad else None, lr, beta1, beta2, beta1**step,
           beta2**step, weight_decay, eps, maximize)
