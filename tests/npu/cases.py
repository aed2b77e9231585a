"""Calls of the NPU ops: good ones with what comes out of them, and bad ones that torch_npu's Meta kernels let through.

The same calls are made with fake tensors of an NPU and with real ones of a CPU.
"""

from __future__ import annotations

from collections.abc import Callable

import layer
import torch

from verl_patches.platform.npu import ops

BF16, FP32 = torch.bfloat16, torch.float32
T, H, N, D, E, K = 12, 48, 4, 24, 16, 4
ENDS = [5, 12]


class Maker:
    """Makes the inputs on one device; under FakeTensorMode they hold nothing, so values are given as code for both."""

    def __init__(self, device: str):
        self.device = device
        self.leaves: dict[str, torch.Tensor] = {}

    def leaf(self, name: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """An input whose gradient counts."""
        made = (torch.randn(shape, device=self.device) * 0.1).to(dtype).requires_grad_()
        self.leaves[name] = made
        return made

    def values(self, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        """An input without gradient."""
        return (torch.randn(shape, device=self.device) * 0.1).to(dtype)

    def chosen(self) -> torch.Tensor:
        """[T, K] int32, different experts for each token."""
        return (torch.arange(T * K, dtype=torch.int32, device=self.device) % E).view(T, K)

    def counts(self, experts: int = E, rows: int = T * K) -> torch.Tensor:
        """[experts] int64 that sum to rows."""
        return torch.full((experts,), rows // experts, dtype=torch.int64, device=self.device)

    def causal(self) -> torch.Tensor:
        """The mask of the sparse modes."""
        return torch.ones(2048, 2048, dtype=torch.bool, device=self.device).triu(1)


def whole_layer(m: Maker, s: layer.Sizes, tokens: int, ends: list[int]) -> torch.Tensor:
    """The layer's output, every parameter a leaf."""
    p = {name: m.leaf(name, *shape) for name, shape in layer.parameter_shapes(s).items()}
    x = m.leaf("x", tokens, s.hidden)
    cos, sin = (m.values(tokens, 1, 1, s.rope) for _ in range(2))
    return layer.forward(s, p, x, cos, sin, m.causal(), m.values(s.experts, dtype=FP32), ends)


def _attention(layout: str, shape: tuple[int, ...], **kw) -> Callable[[Maker], torch.Tensor]:
    def call(m: Maker) -> torch.Tensor:
        q, k, v = (m.leaf(name, *shape) for name in "qkv")
        mask = {"mask": m.causal()} if kw.get("sparse_mode") else {}
        return ops.attention(q, k, v, heads=N, layout=layout, scale=0.1, **mask, **kw)

    return call


# name -> what gives the primary outputs; the gradients of all leaves are looked at too
CASES: dict[str, Callable[[Maker], torch.Tensor | tuple[torch.Tensor, ...]]] = {
    "rms_norm": lambda m: ops.rms_norm(m.leaf("x", T, H), m.leaf("gamma", H), 1e-6),
    "rms_norm fp32 gamma": lambda m: ops.rms_norm(m.leaf("x", T, H), m.leaf("gamma", H, dtype=FP32), 1e-6),
    "swiglu": lambda m: ops.swiglu(m.leaf("x", T, 2 * H)),
    "rotary": lambda m: ops.rotary(m.leaf("x", T, 1, N, 8), m.values(T, 1, 1, 8), m.values(T, 1, 1, 8)),
    "rotary interleaved": lambda m: ops.rotary(m.leaf("x", T, 1, N, 8), m.values(T, 1, 1, 8), m.values(T, 1, 1, 8),
                                               interleaved=True),
    "attention BSH": _attention("BSH", (2, 6, N * D)),
    "attention SBH causal": _attention("SBH", (6, 2, N * D), sparse_mode=3),
    "attention BSH causal": _attention("BSH", (2, 6, N * D), sparse_mode=2),
    "attention BNSD": _attention("BNSD", (2, N, 6, D)),
    "attention BSND": _attention("BSND", (2, 6, N, D)),
    "attention TND causal": _attention("TND", (T, N, D), sparse_mode=3, q_ends=ENDS, kv_ends=ENDS),
    "choose_experts": lambda m: ops.choose_experts(m.values(T, E, dtype=FP32), m.values(E, dtype=FP32), k=K, groups=4,
                                                   groups_kept=2, scaling=2.5),
    "permute": lambda m: ops.permute(m.leaf("x", T, H), m.chosen()),
    "unpermute": lambda m: ops.unpermute(m.leaf("rows", T * K, H), m.chosen().flatten().argsort().to(torch.int32),
                                         m.leaf("weights", T, K)),
    "grouped_matmul": lambda m: ops.grouped_matmul(m.leaf("x", T * K, H), m.leaf("weight", E, H, 40), m.counts()),
    "layer": lambda m: whole_layer(m, layer.TINY, T, ENDS),
}  # fmt: skip


def outcome(case: Callable, device: str) -> dict[str, list]:
    """{"output 0": [shape, dtype, device], ..., "gradient NAME": ...} of one case, forward and backward."""
    m = Maker(device)
    made = case(m)
    made = made if isinstance(made, (list, tuple)) else (made,)
    loss = sum(y.float().sum() for y in made if y.requires_grad)
    if m.leaves:
        loss.backward()
    found = {f"output {number}": y for number, y in enumerate(made)}
    found |= {f"gradient {name}": leaf.grad for name, leaf in m.leaves.items()}
    return {name: y if y is None else [list(y.shape), str(y.dtype), y.device.type] for name, y in found.items()}


def _grouped(torch_npu, m, *shape, dtype=BF16):
    return torch_npu.npu_grouped_matmul([m.values(T * K, *shape, dtype=dtype)], [m.values(E, H, 40)], split_item=3,
                                        group_list=m.counts(), group_type=0, group_list_type=1)


def _attend(torch_npu, m, layout, shape, **kw):
    q, k, v = (m.values(*shape) for _ in "qkv")
    return torch_npu.npu_fusion_attention(q, k, v, N, layout, **kw)


def _ours(m, layout, shape, **kw):
    q, k, v = (m.values(*shape) for _ in "qkv")
    return ops.attention(q, k, v, heads=N, layout=layout, scale=1.0, **kw)


# name -> (the call of torch_npu itself, which Meta lets through; the same through our op; what the refusal must name)
BAD: dict[str, tuple[Callable, Callable, str]] = {
    "grouped_matmul, K differs": (
        lambda npu, m: _grouped(npu, m, H - 8),
        lambda m: ops.grouped_matmul(m.values(T * K, H - 8), m.values(E, H, 40), m.counts()), "K differs, 40 and 48"),
    "grouped_matmul, fp32 times bf16": (
        lambda npu, m: _grouped(npu, m, H, dtype=FP32),
        lambda m: ops.grouped_matmul(m.values(T * K, H, dtype=FP32), m.values(E, H, 40), m.counts()), "torch.float32"),
    "grouped_matmul, counts for other experts": (
        lambda npu, m: npu.npu_grouped_matmul([m.values(T * K, H)], [m.values(E, H, 40)], group_list=m.counts(8),
                                              split_item=3, group_type=0, group_list_type=1),
        lambda m: ops.grouped_matmul(m.values(T * K, H), m.values(E, H, 40), m.counts(8)), "counts"),
    "attention, unknown layout": (
        lambda npu, m: _attend(npu, m, "XYZ", (2, 6, N * D)),
        lambda m: _ours(m, "XYZ", (2, 6, N * D)), "'XYZ'"),
    "attention, TND without ends": (
        lambda npu, m: _attend(npu, m, "TND", (T, N, D)),
        lambda m: _ours(m, "TND", (T, N, D)), "cumulative ends"),
    "attention, TND with ends of other tokens": (
        lambda npu, m: _attend(npu, m, "TND", (T, N, D), actual_seq_qlen=[5], actual_seq_kvlen=[5]),
        lambda m: _ours(m, "TND", (T, N, D), q_ends=[5], kv_ends=[5]), "[5]"),
    "attention, causal with a mask of the lengths": (
        lambda npu, m: _attend(npu, m, "BNSD", (2, N, 6, D), sparse_mode=2, atten_mask=m.causal()[:6, :6]),
        lambda m: _ours(m, "BNSD", (2, N, 6, D), sparse_mode=2, mask=m.causal()[:6, :6]), "[2048, 2048]"),
    "rms_norm, gamma of another width": (
        lambda npu, m: npu.npu_rms_norm(m.values(T, H), m.values(H - 8)),
        lambda m: ops.rms_norm(m.values(T, H), m.values(H - 8), 1e-6), "gamma [40]"),
    "swiglu, odd width": (
        lambda npu, m: npu.npu_swiglu(m.values(T, H + 1)),
        lambda m: ops.swiglu(m.values(T, H + 1)), "must be even"),
    "rotary, cos of another width": (
        lambda npu, m: npu.npu_rotary_mul(m.values(T, 1, N, 8), m.values(T, 1, 1, 4), m.values(T, 1, 1, 4)),
        lambda m: ops.rotary(m.values(T, 1, N, 8), m.values(T, 1, 1, 4), m.values(T, 1, 1, 4)), "as wide as x"),
    "choose_experts, more than the groups hold": (
        lambda npu, m: npu.npu_moe_gating_top_k(m.values(T, E), E, k_group=1, group_count=4),
        lambda m: ops.choose_experts(m.values(T, E), m.values(E), k=E, groups=4, groups_kept=1, scaling=1.0), "chosen"),
    "permute, experts of other tokens": (
        lambda npu, m: npu.npu_moe_token_permute(m.values(T + 1, H), m.chosen()),
        lambda m: ops.permute(m.values(T + 1, H), m.chosen()), "[13, 48]"),
    "unpermute, weights of other tokens": (
        lambda npu, m: npu.npu_moe_token_unpermute(m.values(T * K, H), m.chosen().flatten(), m.values(T + 1, K)),
        lambda m: ops.unpermute(m.values(T * K, H), m.chosen().flatten(), m.values(T + 1, K)), "[13, 4]"),
}  # fmt: skip
