"""AdamW steps against the formula in fp64, and against torch's own."""

import pytest
import torch

from verl_patches.platform.cpu.ascend.mindspeed_ops import npu_apply_fused_adamw_v2
from verl_patches.platform.cpu.ascend.packages import torch_npu

LR, BETAS, EPS, DECAY = 0.1, (0.8, 0.9), 1e-3, 0.2


def states():
    torch.manual_seed(1)
    return [torch.randn(5, dtype=torch.float64), *torch.zeros(3, 5, dtype=torch.float64)]


def torch_adamw(grads, **more):
    param = torch.nn.Parameter(states()[0])
    optimizer = torch.optim.AdamW([param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, foreach=False, **more)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_equal_to_torch_over_steps(amsgrad, maximize):
    grads = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2)) * torch.tensor(
        [[5.0], [1.0], [0.1], [0.1]]
    )
    expected = torch_adamw(grads, amsgrad=amsgrad, maximize=maximize)
    for op in ("torch_npu", "builder"):
        param, m, v, largest = states()
        for step, grad in enumerate(grads, 1):
            if op == "torch_npu":
                found = torch_npu.npu_apply_adam_w(
                    BETAS[0] ** (step - 1),
                    BETAS[1] ** (step - 1),
                    LR,
                    DECAY,
                    *BETAS,
                    EPS,
                    grad,
                    largest if amsgrad else None,
                    amsgrad,
                    maximize,
                    out=(param, m, v),
                )
                assert found[0] is param and found[1] is m and found[2] is v  # in place
            else:
                npu_apply_fused_adamw_v2(
                    param, grad, m, v, largest, torch.tensor([step]), LR, *BETAS, DECAY, EPS, amsgrad, maximize
                )
        torch.testing.assert_close(param, expected)


def test_one_step_by_hand_and_the_powers_are_those_of_the_step_before():
    def step(power1, power2):
        param, m, v, _ = states()
        torch_npu.npu_apply_adam_w(
            power1,
            power2,
            LR,
            DECAY,
            *BETAS,
            EPS,
            torch.ones(5, dtype=torch.float64),
            None,
            False,
            False,
            out=(param, m, v),
        )
        return param, m, v

    param, m, v = step(1.0, 1.0)
    torch.testing.assert_close(m, torch.full((5,), 0.2, dtype=torch.float64))
    torch.testing.assert_close(v, torch.full((5,), 0.1, dtype=torch.float64))
    torch.testing.assert_close(param, states()[0] * (1 - LR * DECAY) - LR / (1 + EPS))
    assert not torch.allclose(step(BETAS[0], BETAS[1])[0], param)


def test_half_precision_gradient_and_fp32_state():
    param, m, v = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    npu_apply_fused_adamw_v2(
        param, torch.tensor([1.0, -2.0]).bfloat16(), m, v, v, torch.tensor([1]), 1.0, 0.9, 0.9, 0.0, 1e-8, False, False
    )
    torch.testing.assert_close(param, torch.tensor([-1.0, 1.0]))


def test_refused():
    p, m, v, _ = states()
    adam = (0.9, 0.9, LR, DECAY, *BETAS, EPS)
    for words, call in {
        "one shape": lambda: torch_npu.npu_apply_adam_w(*adam, p[:3], None, False, False, out=(p, m, v)),
        "out must be": lambda: torch_npu.npu_apply_adam_w(*adam, p, None, False, False, out=(p, m)),
        "amsgrad needs": lambda: torch_npu.npu_apply_adam_w(*adam, p, None, True, False, out=(p, m, v)),
        "first step is 1": lambda: npu_apply_fused_adamw_v2(
            p, p, m, v, v, torch.tensor([0]), LR, *BETAS, 0.0, EPS, False, False
        ),
        "one number": lambda: npu_apply_fused_adamw_v2(
            p, p, m, v, v, torch.tensor([1, 2]), LR, *BETAS, 0.0, EPS, False, False
        ),
    }.items():
        with pytest.raises(ValueError, match=words):
            call()
