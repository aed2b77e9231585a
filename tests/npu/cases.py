"""Define calls of torch_npu and of our attention, and record their results.

The same calls are made with fake tensors of an NPU and with real ones of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from verl_patches.platform.npu import attention

BF16, FP32 = torch.bfloat16, torch.float32
T, H, N, D, E, K = 12, 48, 4, 24, 16, 4
ENDS = [5, 12]


class Maker:
    """Make inputs on one device; values are given as code, because tensors under FakeTensorMode hold none."""

    def __init__(self, device: str):
        self.device = device
        self.leaves: dict[str, torch.Tensor] = {}

    def leaf(self, name: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """Make an input whose gradient is recorded."""
        made = (torch.randn(shape, device=self.device) * 0.1).to(dtype).requires_grad_()
        self.leaves[name] = made
        return made

    def values(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """Make an input without gradient."""
        return (torch.randn(shape, device=self.device) * 0.1).to(dtype)

    def chosen(self) -> torch.Tensor:
        """Make [T, K] int32 with different experts for each token."""
        return (torch.arange(T * K, dtype=torch.int32, device=self.device) % E).view(T, K)

    def counts(self, experts: int = E, rows: int = T * K) -> torch.Tensor:
        """Make [experts] int64 that sum to rows."""
        return torch.full((experts,), rows // experts, dtype=torch.int64, device=self.device)


def _attention(npu: Any, m: Maker, *shape: int, ends: list[int] | None = None) -> torch.Tensor:
    q, k, v = (m.leaf(name, *shape) for name in "qkv")
    return attention.fused_attention(q, k, v, heads=N, scale=0.1, ends=ends)


def _rotary(npu: Any, m: Maker, mode: str) -> torch.Tensor:
    return npu.npu_rotary_mul(m.leaf("x", T, 1, N, 8), m.values(T, 1, 1, 8), m.values(T, 1, 1, 8), rotary_mode=mode)


# name -> call(torch_npu, maker) that returns the outputs; the gradients of all leaves are recorded too
CASES: dict[str, Callable[[Any, Maker], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "rms_norm": lambda npu, m: npu.npu_rms_norm(m.leaf("x", T, H), m.leaf("gamma", H), epsilon=1e-6)[0],
    "rms_norm fp32 gamma": lambda npu, m: npu.npu_rms_norm(m.leaf("x", T, H), m.leaf("gamma", H, dtype=FP32))[0],
    "swiglu": lambda npu, m: npu.npu_swiglu(m.leaf("x", T, 2 * H), dim=-1),
    "rotary": lambda npu, m: _rotary(npu, m, "half"),
    "rotary interleaved": lambda npu, m: _rotary(npu, m, "interleave"),
    "attention": lambda npu, m: _attention(npu, m, 6, 2, N * D),
    "attention, packed": lambda npu, m: _attention(npu, m, T, N, D, ends=ENDS),
    "gating": lambda npu, m: npu.npu_moe_gating_top_k(
        m.values(T, E, dtype=FP32), K, bias=m.values(E, dtype=FP32), k_group=2, group_count=4, group_select_mode=1,
        renorm=0, norm_type=1, out_flag=False, routed_scaling_factor=2.5, eps=1e-20)[:2],
    "permute": lambda npu, m: npu.npu_moe_token_permute(m.leaf("x", T, H), m.chosen()),
    "unpermute": lambda npu, m: npu.npu_moe_token_unpermute(
        m.leaf("rows", T * K, H), m.chosen().flatten().argsort().to(torch.int32), probs=m.leaf("weights", T, K)),
    "grouped_matmul": lambda npu, m: npu.npu_grouped_matmul(
        [m.values(T * K, H)], [m.values(E, H, 40)], group_list=m.counts(), split_item=3, group_type=0,
        group_list_type=1)[0],
}  # fmt: skip


def outcome(case: Callable, npu: Any, device: str) -> dict[str, list]:
    """Return {"output 0": [shape, dtype, device], ..., "gradient NAME": ...} of one case, forward and backward."""
    m = Maker(device)
    made = case(npu, m)
    made = made if isinstance(made, (list, tuple)) else (made,)
    loss = sum(y.float().sum() for y in made if y.requires_grad)
    if m.leaves:
        loss.backward()
    found = {f"output {number}": y for number, y in enumerate(made)}
    found |= {f"gradient {name}": leaf.grad for name, leaf in m.leaves.items()}
    return {name: y if y is None else [list(y.shape), str(y.dtype), y.device.type] for name, y in found.items()}


def refusal(call: Callable[[], Any]) -> str | None:
    """Return "Type: message" of the error that a call raises, None without an error."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None
