"""Arguments of verl's in-process vLLM engine: what a rollout layout means for them, and which ones vLLM refuses."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.layout.parallel import ParallelLayout

ROLLOUT = "actor_rollout_ref.rollout"


def llm_kwargs(layout: ParallelLayout) -> dict[str, Any]:
    """vLLM engine arguments of a rollout layout (`layout.parallel.rollout_layout`), for verl's `engine_kwargs.vllm`.

    tensor_parallel_size is not among them: verl passes `rollout.tensor_model_parallel_size` itself
    (`rollout_overrides`). data_parallel_size counts replicas inside one instance, which share experts and step
    together; instances are independent. Raises ConfigError for layouts that verl 0.4.0 or vLLM cannot build.
    """
    if layout.pp > 1 or layout.cp > 1:
        raise ConfigError(f"rollout layout {layout}: verl 0.4.0 builds vLLM with tp and dp only; set pp=1 and cp=1")
    replicas = layout.dp // layout.edp
    whole_experts = layout.ep > 1
    if layout.dp % layout.edp or (layout.ep, layout.etp) not in ((layout.tp * replicas, 1), (1, layout.tp * replicas)):
        raise ConfigError(
            f"rollout layout {layout}: vLLM splits experts over all tp*dp ranks of an instance, "
            "either whole (ep = tp*dp, etp = 1) or each one cut (ep = 1, etp = tp*dp); "
            "build it with layout.parallel.rollout_layout"
        )
    kwargs: dict[str, Any] = {"enable_expert_parallel": whole_experts}
    if replicas > 1:
        kwargs["data_parallel_size"] = replicas
    return kwargs


def rollout_overrides(layout: ParallelLayout, actor_world_size: int) -> dict[str, Any]:
    """{dotted verl config key: value} that makes verl build its rollout in `layout`.

    verl's own conditions: rollout and actor share all ranks (`world_size // infer_tp` replicas,
    megatron_workers.py:227), and each replica, whichever instance it belongs to, generates its own share of the batch:
    verl dispatches it over world_size // tp shares, so the prompts of a step must be a multiple of that.
    Raises ConfigError where the two sides count ranks differently.
    """
    if layout.world_size != actor_world_size:
        raise ConfigError(
            f"rollout layout {layout} has {layout.world_size} ranks, the actor has {actor_world_size}: "
            "verl colocates them, so both must cover the same ranks; change instances, dp or tp of the rollout"
        )
    keys: dict[str, Any] = {f"{ROLLOUT}.tensor_model_parallel_size": layout.tp}
    keys.update({f"{ROLLOUT}.engine_kwargs.vllm.{name}": value for name, value in llm_kwargs(layout).items()})
    return keys


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
