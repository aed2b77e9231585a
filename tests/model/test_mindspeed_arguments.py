"""HF config to MindSpeed-LLM arguments: everything is carried over or checked."""

from __future__ import annotations

import json

import pytest

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
