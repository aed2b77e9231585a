"""Route random tokens as vllm-ascend does without 256 experts, and as transformers' DeepSeek-V3 does."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

TOKENS, HIDDEN = 4096, 64


def main(cases: dict[str, dict]) -> dict[str, list[float]]:
    """Return, for each case, [share of tokens with other experts than in transformers, largest error of a weight].

    A case has transformers' `config` of a router, which is also that of vllm-ascend but for the keys in `wrong`;
    `dtype` of vllm-ascend's router, fp32 with row rollout.ascend_fp32_router; `without`, patches replaced by upstream's
    objects; and `fault`, a name of _FAULTS. An error is relative to transformers' weight of the same expert, and is
    taken where experts are the same.
    """
    return {name: _compared(**case) for name, case in cases.items()}


def _compared(config: dict, wrong=None, dtype: str = "float32", without=(), fault: str | None = None) -> list[float]:
    """Return the answer of `main` for a case; tokens are bf16, weight and bias of transformers' router fp32."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    from tests.emulation.emulated_engine import without as without_rows

    draw = torch.Generator().manual_seed(0)
    router = DeepseekV3TopkRouter(SimpleNamespace(**config, hidden_size=HIDDEN))
    count = config["n_routed_experts"]
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=draw) / HIDDEN**0.5)
        bias = torch.rand(count, generator=draw) if config["n_group"] > 1 else torch.randn(count, generator=draw)
        router.e_score_correction_bias.copy_(bias * 0.5)  # not negative with groups, as in verl_patches/model/tiny.py
    tokens = torch.randn(TOKENS, HIDDEN, generator=draw).bfloat16()
    expected = router(tokens)
    with without_rows(list(without)) if without else nullcontext():
        experts, weights = _select(config | (wrong or {}), router, tokens, getattr(torch, dtype))
    if fault:
        weights = _FAULTS[fault](weights, experts, router, config["routed_scaling_factor"])
    (experts, weights), (wanted, wanted_weights) = map(_in_order, ((experts, weights), expected))
    same = (experts == wanted).all(-1)
    errors = (weights / wanted_weights - 1)[same].abs()
    return [1 - same.float().mean().item(), errors.max().item()]


def _select(config: dict, router: Any, tokens: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vllm-ascend's experts [T, k] and their weights, which its MoE block scales after it has added them up."""
    from vllm_ascend.ops.fused_moe import select_experts

    weights, experts = select_experts(
        hidden_states=tokens,
        router_logits=torch.nn.functional.linear(tokens.to(dtype), router.weight.to(dtype)),
        top_k=config["num_experts_per_tok"],
        use_grouped_topk=True,
        renormalize=config["norm_topk_prob"],
        topk_group=config["topk_group"],
        num_expert_group=config["n_group"],
        scoring_func="sigmoid",
        e_score_correction_bias=router.e_score_correction_bias.to(dtype),
    )
    return experts.long(), weights.float() * config["routed_scaling_factor"]


def _in_order(routed: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    experts, places = routed[0].sort(-1)
    return experts, routed[1].gather(1, places)


def _with_bias(weights: torch.Tensor, experts: torch.Tensor, router: Any, factor: float) -> torch.Tensor:
    scores = weights + router.e_score_correction_bias[experts]
    return scores / scores.sum(-1, keepdim=True) * factor


_FAULTS = {
    "the bias is left in the weights": _with_bias,
    "weights are not scaled": lambda weights, experts, router, factor: weights / factor,
    "weights are scaled twice": lambda weights, experts, router, factor: weights * factor,
}
