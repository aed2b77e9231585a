"""Arguments and parameters of verl's in-process vLLM engine."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from verl_patches.rollout.engine import drop_empty_image_arguments, keep_correction_bias_fp32


def test_image_arguments_go_only_without_a_limit():
    """Row rollout.llm_arguments; with a real LLM: tests/platform/test_cpu_vllm.py."""
    seen = []
    init = drop_empty_image_arguments(lambda self, **kwargs: seen.append(kwargs))
    init(None, model="m", limit_mm_per_prompt=None, disable_mm_preprocessor_cache=True)
    init(None, model="m", limit_mm_per_prompt={"image": 1}, disable_mm_preprocessor_cache=True)
    kept = {"limit_mm_per_prompt": {"image": 1}, "disable_mm_preprocessor_cache": True}
    assert seen == [{"model": "m"}, {"model": "m", **kept}]


def test_correction_bias_is_made_fp32_and_a_missing_one_stays_missing():
    """Row rollout.fp32_correction_bias; in a real bf16 engine: tests/rollout/test_parity.py."""
    for bias in (torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16)), None):
        layer = SimpleNamespace(gate=SimpleNamespace(e_score_correction_bias=bias))
        upstream, ours = (lambda self: None), keep_correction_bias_fp32(lambda self: None)
        upstream(layer)
        assert bias is None or bias.dtype is torch.bfloat16
        ours(layer)
        assert layer.gate.e_score_correction_bias is bias and (bias is None or bias.dtype is torch.float32)
