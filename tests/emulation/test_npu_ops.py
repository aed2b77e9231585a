"""Test reference ops that comparisons with transformers do not cover: the optimizer, and a router's eps.

tests/model/test_mindspeed_parity.py tests gradients and each fused kernel on and off, test_npu_emulated.py whole
engines, each op with a fault.
"""

import pytest
import torch

from verl_patches.emulation.ascend import mindspeed_ops
from verl_patches.emulation.ascend.packages import torch_npu


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


LR, BETAS, EPS, DECAY = 0.1, (0.8, 0.9), 1e-3, 0.2


@pytest.mark.parametrize("op", ["torch_npu", "builder"])
def test_adamw_equals_torch_over_steps(op):
    param, m, v = randn(5), *torch.zeros(2, 5, dtype=torch.float64)
    plain = torch.nn.Parameter(param.clone())
    optimizer = torch.optim.AdamW([plain], LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False)
    for step, grad in enumerate(randn(4, 5) * torch.tensor([[5.0], [1.0], [0.1], [0.1]]), 1):
        plain.grad = grad.clone()
        optimizer.step()
        if op == "torch_npu":  # powers are those of the step before
            powers = [beta ** (step - 1) for beta in BETAS]
            call = *powers, LR, DECAY, *BETAS, EPS, grad, None, False, False
            found = torch_npu.npu_apply_adam_w(*call, out=(param, m, v))
            assert found[0] is param and found[1] is m and found[2] is v  # in place
        else:
            rest = torch.tensor([step]), LR, *BETAS, DECAY, EPS, False, False
            mindspeed_ops.npu_apply_fused_adamw_v2(param, grad, m, v, v, *rest)
    torch.testing.assert_close(param, plain.detach())


def test_weights_of_chosen_experts_are_their_shares_of_the_sum_and_eps():
    x, shape = randn(64, 16), {"k_group": 2, "group_count": 4, "group_select_mode": 1, "norm_type": 1}
    weights, chosen, _ = torch_npu.npu_moe_gating_top_k(x, 3, bias=randn(16), eps=0.5, **shape)
    raw = x.sigmoid().gather(1, chosen.long())
    torch.testing.assert_close(weights, raw / (raw.sum(1, keepdim=True) + 0.5))
