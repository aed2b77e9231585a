"""AdamW steps, in place."""

from __future__ import annotations

import torch

from verl_patches.platform.cpu.ascend.ops.checked import demand, torch_npu_op


@torch_npu_op
def npu_apply_adam_w(beta1_power, beta2_power, lr, weight_decay, beta1, beta2, epsilon, grad, max_grad_norm, amsgrad,
                     maximize, *, out):
    """One AdamW step on out=(parameter, first moment, second moment), all changed in place and returned.

    beta1_power and beta2_power are the powers of the step before (beta ** (step - 1)): the kernel multiplies once more.
    Without `out` the real function refuses; here it is a TypeError.
    """
    demand(len(out) == 3, "npu_apply_adam_w", f"out must be (var, m, v), found {len(out)} tensors")
    demand(not amsgrad or max_grad_norm is not None, "npu_apply_adam_w", "amsgrad needs max_grad_norm")
    adam_w(*out, grad, max_grad_norm if amsgrad else None, lr, beta1, beta2, beta1_power * beta1, beta2_power * beta2,
           weight_decay, epsilon, bool(maximize))
    return tuple(out)


@torch.no_grad()
def adam_w(param, exp_avg, exp_avg_sq, grad, max_exp_avg_sq, lr, beta1, beta2, beta1_power, beta2_power, weight_decay,
           eps, maximize) -> None:
    """The step itself, with bias correction by 1 - power of this step; max_exp_avg_sq None: no amsgrad."""
    shapes = {tuple(x.shape) for x in (param, exp_avg, exp_avg_sq, grad)}
    demand(len(shapes) == 1, "AdamW", f"parameter, moments and gradient must have one shape, found {sorted(shapes)}")
    grad = (-grad if maximize else grad).to(exp_avg.dtype)
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    second = exp_avg_sq
    if max_exp_avg_sq is not None:
        torch.maximum(max_exp_avg_sq, exp_avg_sq, out=max_exp_avg_sq)
        second = max_exp_avg_sq
    denominator = (second / (1 - beta2_power)).sqrt_().add_(eps)
    param.mul_(1 - lr * weight_decay).addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1_power))
