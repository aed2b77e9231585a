"""Arguments and parameters of verl's in-process vLLM engine."""

from __future__ import annotations

import torch

from verl_patches.rollout.engine import drop_empty_image_arguments, route_in_fp32


def test_image_arguments_go_only_without_a_limit():
    """Row rollout.llm_arguments; with a real LLM: tests/platform/test_cpu_vllm.py."""
    seen = []
    init = drop_empty_image_arguments(lambda self, **kwargs: seen.append(kwargs))
    init(None, model="m", limit_mm_per_prompt=None, disable_mm_preprocessor_cache=True)
    init(None, model="m", limit_mm_per_prompt={"image": 1}, disable_mm_preprocessor_cache=True)
    kept = {"limit_mm_per_prompt": {"image": 1}, "disable_mm_preprocessor_cache": True}
    assert seen == [{"model": "m"}, {"model": "m", **kept}]


def test_the_router_works_in_fp32():
    """Row rollout.fp32_router; in a real bf16 engine: tests/rollout/test_parity.py."""
    layer = torch.nn.Module()
    layer.gate = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
    layer.gate.e_score_correction_bias = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    bias, tokens = layer.gate.e_score_correction_bias, torch.randn(3, 8, dtype=torch.bfloat16)
    rounded = layer.gate(tokens)
    route_in_fp32(lambda self: None)(layer)
    assert layer.gate.e_score_correction_bias is bias and bias.dtype is torch.float32
    exact = layer.gate(tokens)
    assert rounded.dtype is torch.bfloat16 and exact.dtype is torch.float32
    assert torch.equal(exact, tokens.float() @ layer.gate.weight.T) and not torch.equal(exact, rounded.float())
