"""Routed experts of vLLM's FusedMoE in plain torch, with expert parallelism.

vLLM 0.9.1 runs experts on CPU through intel_extension_for_pytorch, which takes no expert map and so cannot do expert
parallelism. Here vLLM's own `FusedMoE.select_experts` routes and these functions compute.

Shape letters: T tokens, H hidden, F expert intermediate, e local experts, K experts a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def fused_experts(
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    inplace: bool = False,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    use_fp8_w8a8: bool = False,
    use_int8_w8a8: bool = False,
    use_int8_w8a16: bool = False,
    use_int4_w4a16: bool = False,
    per_channel_quant: bool = False,
    global_num_experts: int = -1,
    expert_map: torch.Tensor | None = None,
    w1_scale: torch.Tensor | None = None,
    w2_scale: torch.Tensor | None = None,
    w1_zp: torch.Tensor | None = None,
    w2_zp: torch.Tensor | None = None,
    a1_scale: torch.Tensor | None = None,
    a2_scale: torch.Tensor | None = None,
    block_shape: list[int] | None = None,
    allow_deep_gemm: bool = False,
) -> torch.Tensor:
    """Sum over each token's chosen experts of weight * down(silu(gate(x)) * up(x)); experts of other ranks add nothing.

    hidden_states [T, H]; w1 [e, 2F, H], gate above up; w2 [e, H, F]; topk_weights, topk_ids [T, K]; expert_map
    [global_num_experts] gives the local index or -1. Returns [T, H] in hidden_states' dtype, summed in fp32; `inplace`
    and `allow_deep_gemm` are hints that are not taken. Follows vLLM's Triton `fused_experts`. Raises
    NotImplementedError for other activations and quantised experts.
    """
    if activation != "silu" or apply_router_weight_on_input:
        raise NotImplementedError(f"experts on CPU: only silu, weights on the output; found activation {activation!r}")
    if use_fp8_w8a8 or use_int8_w8a8 or use_int8_w8a16 or use_int4_w4a16:
        raise NotImplementedError("experts on CPU: only weights that are not quantised")
    ids = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()].long()
    out = torch.zeros(hidden_states.shape, dtype=torch.float32)
    for expert in ids[ids >= 0].unique().tolist():
        token, choice = torch.where(ids == expert)
        gate, up = F.linear(hidden_states[token], w1[expert]).chunk(2, dim=-1)
        down = F.linear(F.silu(gate) * up, w2[expert])
        out.index_add_(0, token, down.float() * topk_weights[token, choice, None].float())
    return out.to(hidden_states.dtype)


def keep_expert_weights(self: object, layer: torch.nn.Module) -> None:
    """UnquantizedFusedMoEMethod.process_weights_after_loading that packs nothing for ipex: weights stay as loaded."""
