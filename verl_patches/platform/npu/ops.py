"""NPU ops, checked (guards.py) and differentiable; T tokens, H hidden, k experts a token, E experts, N heads.

Production calls `attention` (model/mindspeed/model.py): that call to torch_npu is this project's own. MindSpeed
calls torch_npu itself for norms and SwiGLU, and its op builders for the rest; tests/npu/boot_job.py makes these three
calls as production does, on the real torch_npu. The other wrappers here say what the rest must be like, and tests/npu
makes a DeepSeek-V3 layer of all of them.

Every argument whose default is not the same in all versions of torch_npu is given (grouped matmul's `group_type` is -1
in 2.5.1 and None later), and none that the pinned 2.5.1.post1 does not have.
"""

from __future__ import annotations

from typing import Any

import torch

from verl_patches.platform.npu import guards

UNLIMITED = 2147483647  # of attention's `pre_tockens` and `next_tockens`: no band


def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * gamma over the last dimension."""
    guards.norm("rms_norm", x, gamma)
    import torch_npu

    return torch_npu.npu_rms_norm(x, gamma, epsilon=epsilon)[0]


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension."""
    guards.halves("swiglu", x)
    import torch_npu

    return torch_npu.npu_swiglu(x, dim=-1)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x * cos + turned x * sin over the last of four dimensions; halves are turned, or neighbours (interleaved)."""
    guards.rotation("rotary", x, cos, sin)
    import torch_npu

    return torch_npu.npu_rotary_mul(x, cos, sin, rotary_mode="interleave" if interleaved else "half")


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, heads: int, layout: str, scale: float,
              mask: torch.Tensor | None = None, sparse_mode: int = 0, q_ends: list[int] | None = None,
              kv_ends: list[int] | None = None) -> torch.Tensor:
    """softmax(scale * q k^T, masked) v in the layout of query.

    layout: BSH, SBH, BNSD, BSND, or TND with the cumulative ends of its sequences. mask: set is hidden; sparse_mode 0
    takes it as it is, 2 and 3 are causal (to the left upper, right lower corner) and take the 2048 x 2048 triangle.
    """
    guards.attention("attention", query, key, value, heads, layout, mask, sparse_mode, q_ends, kv_ends)
    import torch_npu

    return torch_npu.npu_fusion_attention(
        query, key, value, heads, layout, pse=None, padding_mask=None, atten_mask=mask, scale=scale, keep_prob=1.0,
        pre_tockens=UNLIMITED, next_tockens=UNLIMITED, inner_precise=0, prefix=None, actual_seq_qlen=q_ends,
        actual_seq_kvlen=kv_ends, sparse_mode=sparse_mode,
    )[0]  # fmt: skip


@torch.no_grad()
def choose_experts(logits: torch.Tensor, bias: torch.Tensor, *, k: int, groups: int, groups_kept: int,
                   scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights [T, k], experts [T, k] int32) as DeepSeek-V3 routes: sigmoid, bias for choosing only, best groups first.

    Without a gradient, as not every torch_npu has one here: to train the router, gather sigmoid(logits) at `experts`.
    """
    guards.gate("choose_experts", logits, bias, k, groups, groups_kept)
    import torch_npu

    weights, experts, _ = torch_npu.npu_moe_gating_top_k(
        logits, k, bias=bias, k_group=groups_kept, group_count=groups, group_select_mode=1, renorm=0, norm_type=1,
        out_flag=False, routed_scaling_factor=scaling, eps=1e-20,
    )  # fmt: skip
    return weights, experts


def permute(tokens: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [T, H] in the order of their experts [T, k], [T * k, H]; the place that each (token, choice) went to)."""
    guards.order("permute", tokens, experts)
    import torch_npu

    return torch_npu.npu_moe_token_permute(tokens, experts, num_out_tokens=None, padded_mode=False)


def unpermute(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The way back: [T, H], each token the sum of its k rows weighted by weights [T, k]."""
    guards.way_back("unpermute", rows, places, weights)
    import torch_npu

    return torch_npu.npu_moe_token_unpermute(rows, places, probs=weights, padded_mode=False, restore_shape=None)


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[M, N]: rows of x [M, K], the first counts[0] of them times weight[0], and so on; weight [E, K, N].

    The counts must sum to M: what they leave out stays unwritten on a device, and checking would wait for it.
    """
    guards.product("grouped_matmul", x, weight, counts)
    return _GroupedMatmul.apply(x, weight, counts)


def _grouped(x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor, group_type: int) -> torch.Tensor:
    import torch_npu

    return torch_npu.npu_grouped_matmul([x], [weight], bias=None, group_list=counts, split_item=3,
                                        group_type=group_type, group_list_type=1, act_type=0)[0]


class _GroupedMatmul(torch.autograd.Function):
    """torch_npu has no gradient for its grouped matmul."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, counts)
        return _grouped(x, weight, counts, 0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight, counts = ctx.saved_tensors
        grad = grad.contiguous()
        d_x = _grouped(grad, weight.transpose(1, 2), counts, 0) if ctx.needs_input_grad[0] else None
        d_weight = _grouped(x.t(), grad, counts, 2) if ctx.needs_input_grad[1] else None
        return d_x, d_weight, None
