"""HF config to MindSpeed-LLM arguments: everything is carried over or checked."""

from __future__ import annotations

import json

import pytest

from verl_patches.errors import ConfigError
from verl_patches.model.mindspeed.arguments import ONLY, SIZES, arguments_of, model_settings
from verl_patches.model.tiny import CONFIG_FILE

HF = json.loads(CONFIG_FILE.read_text())
# keys of config.json that change nothing about the training computation
_NO_MATTER = {"architectures", "aux_loss_alpha", "bos_token_id", "eos_token_id", "pad_token_id", "ep_size", "seq_aux",
              "initializer_range", "torch_dtype", "use_cache"}  # fmt: skip


def _value(words: list[str], argument: str) -> str:
    return words[words.index(argument) + 1]


def test_every_key_of_the_config_is_decided_on():
    decided = {*SIZES, *(key for key, _, _ in ONLY), "num_key_value_heads", "rope_scaling"}
    assert set(HF) == decided | _NO_MATTER


def test_the_671b_model():
    hf = json.loads((CONFIG_FILE.parent / "deepseekv3_671b.json").read_text())
    words = arguments_of(model_settings({**hf, "num_nextn_predict_layers": 0}))
    for argument, value in {"--num-layers": "61", "--num-experts": "256", "--n-group": "8", "--topk-group": "4",
                            "--routed-scaling-factor": "2.5", "--rope-scaling-factor": "40", "--kv-lora-rank": "512",
                            "--padded-vocab-size": "129280"}.items():  # fmt: skip
        assert _value(words, argument) == value


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scoring_func": "softmax"}, "HF scoring_func is 'softmax': must be 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ({"q_lora_rank": None}, "q_lora_rank is None"),
        ({"num_key_value_heads": 2}, "one key for each of 4 heads"),
        ({"rope_scaling": None}, "by its yarn only"),
        ({"rope_scaling": {**HF["rope_scaling"], "mscale": None}}, "rope_scaling.mscale is None"),
    ],
)
def test_another_model_is_refused_by_name(change, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        arguments_of(model_settings({**HF, **change}))
