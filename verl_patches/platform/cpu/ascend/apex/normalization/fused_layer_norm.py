"""Stands for `apex.normalization.fused_layer_norm`.

verl imports fused_rms_norm_affine for its own Llama and Qwen2 models (verl/models/llama/megatron/layers/
parallel_rmsnorm.py:18); DeepSeek-V3 is built by MindSpeed-LLM and never calls it.
"""

from __future__ import annotations

from typing import Any

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


def fused_rms_norm_affine(*args: Any, **kwargs: Any) -> Any:
    """Refuses to be called."""
    raise RuntimeError(
        "apex's fused_rms_norm_affine was called: its kernel needs a device, and only verl's own Llama and Qwen2 "
        "models use it; on line a3 the model is MindSpeed-LLM's"
    )
