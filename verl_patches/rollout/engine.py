"""What verl's in-process vLLM engine is built with, where verl 0.4.0 and vLLM 0.9.1 disagree."""

from __future__ import annotations

import functools
from collections.abc import Callable


def drop_empty_image_arguments(original: Callable) -> Callable:
    """`LLM.__init__` for text-only models: verl's image arguments are dropped when no image limit is set.

    verl 0.4.0 always passes limit_mm_per_prompt (None for text, vllm_rollout_spmd.py:160) and
    disable_mm_preprocessor_cache (:159); vLLM 0.9.1 wants a dict for the first and refuses the second for text-only
    models (config.py:695).
    """

    @functools.wraps(original)
    def __init__(self, *args, **kwargs) -> None:
        if "limit_mm_per_prompt" in kwargs and kwargs["limit_mm_per_prompt"] is None:
            del kwargs["limit_mm_per_prompt"]
            kwargs.pop("disable_mm_preprocessor_cache", None)
        original(self, *args, **kwargs)

    return __init__


def keep_correction_bias_fp32(original: Callable) -> Callable:
    """`DeepseekV2MoE.__init__` that keeps the routing bias in fp32, whatever the model's dtype.

    vLLM 0.9.1 makes it in the model's dtype (deepseek_v2.py:118). Rounded to bf16 (8 bits) it ranks experts differently
    than training, which keeps fp32, as the checkpoint does. Scores plus bias are then compared in fp32.
    """

    @functools.wraps(original)
    def __init__(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        bias = self.gate.e_score_correction_bias  # the experts' layer holds the same Parameter
        if bias is not None:
            bias.data = bias.data.float()

    return __init__
