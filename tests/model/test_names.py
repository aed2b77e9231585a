"""Megatron's two spellings of parameter names; names that are refused (tests/reshard/test_train_tensors.py has all)."""

import pytest

from verl_patches.errors import ConfigError
from verl_patches.model.weights import local_name, parse_name, te_name

SPELLINGS = [
    ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc1.weight",
     "decoder.layers.3.mlp.experts.linear_fc1.weight7"),
    ("decoder.layers.3.mlp.experts.local_experts.7.linear_fc2.weight",
     "decoder.layers.3.mlp.experts.linear_fc2.weight7"),
    ("decoder.layers.0.self_attention.q_layernorm.weight",
     "decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight"),
    ("decoder.layers.0.self_attention.kv_layernorm.weight",
     "decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight"),
    ("decoder.layers.0.input_layernorm.weight", "decoder.layers.0.input_layernorm.weight"),
    ("decoder.layers.0.pre_mlp_layernorm.weight", "decoder.layers.0.pre_mlp_layernorm.weight"),
    ("output_layer.weight", "output_layer.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("local", "te"), SPELLINGS)
def test_spellings_are_each_others_inverse(local, te):
    assert te_name(local) == te
    assert local_name(te) == local
    assert parse_name(local, "megatron-local") == parse_name(f"module.module.{te}", "megatron-te")


@pytest.mark.parametrize(
    ("library", "name"),
    [
        ("megatron-local", "decoder.layers.1.mlp.experts.weight1"),
        ("megatron-local", "decoder.layers.x.mlp.router.weight"),
        ("megatron-local", "bias"),
        ("mindspeed", "decoder.layers.0.self_attention.linear_q_down_proj.weight"),
        ("mindspeed", "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"),
        ("mindspeed", "decoder.layers.0.self_attention.linear_qk_nope.weight"),
        ("mindspeed", "mtp_layers.0.final_layernorm.weight"),
    ],
)
def test_names_of_other_models_libraries_and_modes_are_refused(library, name):
    with pytest.raises(ConfigError, match="not one of DeepSeek-V3's"):
        parse_name(name, library)
