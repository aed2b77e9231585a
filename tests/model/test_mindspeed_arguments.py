"""HF config to MindSpeed-LLM arguments: everything is carried over or checked."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from verl_patches.config.recipe import Train
from verl_patches.errors import ConfigError
from verl_patches.model.mindspeed.arguments import IGNORED, ONLY, SIZES, arguments_of, model_settings
from verl_patches.model.tiny import CONFIG_FILE

HF = json.loads(CONFIG_FILE.read_text())


def test_no_matter_gives_no_argument():
    plain = arguments_of(model_settings({key: value for key, value in HF.items() if key not in IGNORED}))
    assert plain == arguments_of(model_settings({**HF, **dict.fromkeys(IGNORED, "anything")}))


def test_transformers_knows_no_further_key():
    """So a config.json that transformers wrote is refused for what it says only, not for what it is called."""
    from transformers import DeepseekV3Config, PretrainedConfig

    own = set(DeepseekV3Config().to_dict()) - set(PretrainedConfig().to_dict())
    keys = [*SIZES, *(key for key, _, _ in ONLY), *IGNORED, "num_key_value_heads", "rope_scaling"]
    assert own <= set(keys) and len(own) > 30 and len(keys) == len(set(keys))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scoring_func": "softmax"}, "HF scoring_func is 'softmax': must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1: must be 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"rope_interleave": False}, "rope_interleave is False"),
        ({"sliding_window": 4096}, "HF sliding_window is 4096: model/mindspeed/arguments.py does not map it"),
        ({"rope_scaling": {**HF["rope_scaling"], "truncate": False}}, "rope_scaling.truncate is False"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"num_key_value_heads": 2}, "one key for each of 4 heads"),
        ({"rope_scaling": None}, "by its yarn only"),
        ({"rope_scaling": {**HF["rope_scaling"], "mscale": None}}, "rope_scaling.mscale is None"),
    ],
)
def test_another_model_is_refused_by_name(change, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        arguments_of(model_settings({**HF, **change}))


PARITY, BATCHES, UPDATE = (f"test_mindspeed_{name}.py" for name in ("parity", "batches", "update"))
ALONE = {  # switch of training -> where it alone differs from the plain run, whose gradient norm is expected
    **{f"fused_{kernel}": (PARITY, "each_setting") for kernel in ("rmsnorm", "swiglu", "rope", "permute")},
    **dict.fromkeys(("fused_linear_wgrad", "fused_expert_wgrad"), (PARITY, "each_setting")),
    "unpadded_attention": (PARITY, "each_setting"),
    "alltoall_overlap": (PARITY, "each_setting"),
    "swap_optimizer": (PARITY, "swapped_optimizer"),
    "enable_gradient_checkpointing": (PARITY, "each_setting"),
    "grad_overlap": (UPDATE, "overlapped_exchanges"),
    "use_remove_padding": (BATCHES, "padded_sequences"),
    "use_dynamic_bsz": (BATCHES, "dynamic_micro_batches"),
    "context_parallel_size": (BATCHES, "context_parallel_ranks"),
}
NOT_ALONE = {  # other values are refused; or the switch changes the gradient, or a call of the trainer
    "grouped_gemm", "param_overlap", "balanced_routing", "skip_old_log_prob",
}  # fmt: skip


def test_every_switch_of_training_has_a_test_in_which_it_alone_is_another():
    switches = {field.name for field in dataclasses.fields(Train) if isinstance(field.default, bool)}
    assert {*ALONE, *NOT_ALONE} >= switches and not ALONE.keys() & NOT_ALONE
    for key, (file, words) in ALONE.items():
        text = (Path(__file__).parent / file).read_text()
        assert key.removeprefix("fused_").removesuffix("_size") in text.replace("PARTS", "context_parallel"), key
        assert re.search(rf"\ndef test_{words}\w*_gives?_the_same_update", text), key
