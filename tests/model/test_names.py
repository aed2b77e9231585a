"""Megatron's two spellings of parameter names, and what HF tensors they stand for."""

import pytest

from verl_patches.errors import ConfigError
from verl_patches.model.weights import local_name, parse_name, te_name, te_names_for_verl

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
    ("output_layer.weight", "output_layer.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("local", "te"), SPELLINGS)
def test_spellings_are_each_others_inverse(local, te):
    assert te_name(local) == te
    assert local_name(te) == local
    assert parse_name(local) == parse_name(te)


def test_places():
    assert parse_name("module.module.embedding.word_embeddings.weight") == (("embedding",), None, None)
    assert parse_name("decoder.layers.2.mlp.router.expert_bias") == (("router_bias",), 2, None)
    expert = parse_name("decoder.layers.2.mlp.experts.linear_fc1.weight11")
    assert expert == (("routed_expert_gate", "routed_expert_up"), 2, 11)
    assert parse_name("decoder.layers.0.mlp.linear_fc1.layer_norm_weight").kinds == ("post_attention_norm",)


@pytest.mark.parametrize("name", ["decoder.layers.1.mlp.experts.weight1", "decoder.layers.x.mlp.router.weight", "bias"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ConfigError, match="not one of DeepSeek-V3's"):
        parse_name(name)


def test_row_gives_verl_the_names_it_knows():
    normalize = te_names_for_verl(lambda name, pp_rank, vpp_rank, config: name.replace("layers.0", "layers.4"))
    assert normalize("decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight", 1, 0, None) == (
        "decoder.layers.4.mlp.experts.linear_fc1.weight7"
    )
