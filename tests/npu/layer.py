"""One layer of DeepSeek-V3 on the NPU ops: multi-head latent attention and a mixture of experts, packed sequences.

Shapes: T tokens, H hidden, N heads, F expert intermediate, E experts, k experts a token. It is a caller of
verl_patches/platform/npu/ops.py for the tests; production runs MindSpeed-LLM's layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from verl_patches.platform.npu import ops


@dataclass(frozen=True)
class Sizes:
    """Of the model; the defaults are DeepSeek-V3's."""

    hidden: int = 7168
    heads: int = 128
    q_lora: int = 1536
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    experts: int = 256
    inter: int = 2048
    k: int = 8
    groups: int = 8
    groups_kept: int = 4
    scaling: float = 2.5


TINY = Sizes(hidden=48, heads=4, q_lora=32, kv_lora=24, nope=16, rope=8, value=16, experts=16, inter=20, k=4,
             groups=4, groups_kept=2)


def parameter_shapes(s: Sizes) -> dict[str, tuple[int, ...]]:
    """{name: shape} of everything that is trained; matrices are [in, out]."""
    width = s.nope + s.rope
    return {
        "input_norm": (s.hidden,),
        "q_down": (s.hidden, s.q_lora),
        "q_norm": (s.q_lora,),
        "q_up": (s.q_lora, s.heads * width),
        "kv_down": (s.hidden, s.kv_lora + s.rope),
        "kv_norm": (s.kv_lora,),
        "kv_up": (s.kv_lora, s.heads * (s.nope + s.value)),
        "o": (s.heads * s.value, s.hidden),
        "pre_mlp_norm": (s.hidden,),
        "router": (s.hidden, s.experts),
        "experts_up": (s.experts, s.hidden, 2 * s.inter),
        "experts_down": (s.experts, s.inter, s.hidden),
        "shared_up": (s.hidden, 2 * s.inter),
        "shared_down": (s.inter, s.hidden),
    }


def attention(s: Sizes, p: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
              mask: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """[T, H]; cos and sin [T, 1, 1, rope]; values are padded to the keys' width, as MindSpeed-LLM does by default."""
    q = ops.rms_norm(x @ p["q_down"], p["q_norm"], 1e-6) @ p["q_up"]
    q_nope, q_rope = q.unflatten(-1, (s.heads, -1)).split((s.nope, s.rope), -1)
    latent, k_rope = (x @ p["kv_down"]).split((s.kv_lora, s.rope), -1)
    kv = ops.rms_norm(latent.contiguous(), p["kv_norm"], 1e-6) @ p["kv_up"]
    k_nope, value = kv.unflatten(-1, (s.heads, -1)).split((s.nope, s.value), -1)
    q_rope = ops.rotary(q_rope.unsqueeze(1).contiguous(), cos, sin).squeeze(1)
    k_rope = ops.rotary(k_rope[:, None, None].contiguous(), cos, sin).squeeze(1).expand(-1, s.heads, -1)
    query, key = torch.cat((q_nope, q_rope), -1), torch.cat((k_nope, k_rope), -1)
    value = pad(value, (0, s.nope + s.rope - s.value))
    out = ops.attention(query, key, value, heads=s.heads, layout="TND", scale=(s.nope + s.rope) ** -0.5, mask=mask,
                        sparse_mode=3, q_ends=ends, kv_ends=ends)
    return out[..., : s.value].flatten(1) @ p["o"]


def experts(s: Sizes, p: dict[str, torch.Tensor], x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """[T, H]: the k routed experts of each token and the shared one; bias [E] chooses only."""
    logits = x.float() @ p["router"].float()
    _, chosen = ops.choose_experts(logits, bias, k=s.k, groups=s.groups, groups_kept=s.groups_kept, scaling=s.scaling)
    scores = logits.sigmoid().gather(1, chosen.long())
    weights = scores / (scores.sum(-1, keepdim=True) + 1e-20) * s.scaling
    flat = chosen.flatten().long()
    counts = torch.zeros(s.experts, dtype=torch.int64, device=x.device).scatter_add_(0, flat, torch.ones_like(flat))
    rows, places = ops.permute(x, chosen)
    rows = ops.swiglu(ops.grouped_matmul(rows, p["experts_up"], counts))
    rows = ops.grouped_matmul(rows, p["experts_down"], counts)
    shared = ops.swiglu(x @ p["shared_up"]) @ p["shared_down"]
    return ops.unpermute(rows, places, weights.to(x.dtype)) + shared


def forward(s: Sizes, p: dict[str, torch.Tensor], x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
            mask: torch.Tensor, bias: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """[T, H] to [T, H]; sequences are packed, `ends` are their cumulative ends."""
    x = x + attention(s, p, ops.rms_norm(x, p["input_norm"], 1e-6), cos, sin, mask, ends)
    return x + experts(s, p, ops.rms_norm(x, p["pre_mlp_norm"], 1e-6), bias)
