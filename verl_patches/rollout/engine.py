"""What verl's in-process vLLM engine is built with, where verl, the model folder and vLLM 0.9.1 disagree."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_patches.layout.model_folder import for_vllm
from verl_patches.memory.sleep_mode import absorb_in_place


def engine_arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments `given` to `LLM.__init__`, but for what vLLM or vllm-ascend refuses.

    verl 0.4.0 always passes limit_mm_per_prompt (None for text, vllm_rollout_spmd.py:160) and
    disable_mm_preprocessor_cache (:159); vLLM 0.9.1 wants a dict for the first and refuses the second for text-only
    models (config.py:695). Unless `quantization` is asked for, the model's configuration goes through
    layout/model_folder.py before vLLM looks for a quantization method (config.py:484, :621); the caller's own
    hf_overrides come after it.
    """
    arguments = dict(given)
    if "limit_mm_per_prompt" in arguments and arguments["limit_mm_per_prompt"] is None:
        del arguments["limit_mm_per_prompt"]
        arguments.pop("disable_mm_preprocessor_cache", None)
    if arguments.get("quantization") is None:
        arguments["hf_overrides"] = _model_view(arguments.get("hf_overrides") or {})
    return arguments


def _model_view(overrides: Callable | dict[str, Any]) -> Callable:
    def view(hf_config: Any) -> Any:
        hf_config = for_vllm(hf_config)
        if callable(overrides):
            return overrides(hf_config)
        hf_config.update(overrides)
        return hf_config

    return view


def route_in_fp32(original: Callable) -> Callable:
    """`DeepseekV2MoE.__init__` whose router works in fp32, whatever the model's dtype: logits, scores, correction bias.

    vLLM 0.9.1 computes logits and scores in the model's dtype and keeps the bias in it (deepseek_v2.py:105-118).
    Training and transformers route in fp32, and the checkpoint's bias is fp32: in bf16 (8 bits) near scores change
    places, and a token goes to other experts than in training. The gate's weight is stored in fp32 for it (7 MB a
    layer at 671B); its input is widened on the way in.
    """

    @functools.wraps(original)
    def __init__(self, *args, **kwargs) -> None:
        original(self, *args, **kwargs)
        for parameter in self.gate.parameters():  # weight, and the bias that the experts' layer holds too
            parameter.data = parameter.data.float()
        self.gate.register_forward_pre_hook(lambda gate, inputs: (inputs[0].float(), *inputs[1:]))

    return __init__


def absorb_mla_again(load_weights: Callable) -> Callable:
    """`DeepseekV2ForCausalLM.load_weights` after which MLA's absorbed projections are those of the new weights.

    vLLM derives W_UV and W_UK_T from kv_b_proj once, when it has built the engine
    (Attention.process_weights_after_loading). They follow later weights only where they are views of it; vllm-ascend
    copies them (attention/mla_v1.py:669), and MindSpeed makes torch.Tensor.view copy. The first load is left to vLLM.
    """

    @functools.wraps(load_weights)
    def load(self, *args, **kwargs):
        loaded = load_weights(self, *args, **kwargs)
        for layer in self.model.layers[self.model.start_layer : self.model.end_layer]:
            absorb_in_place(layer.self_attn.mla_attn)
        return loaded

    return load
