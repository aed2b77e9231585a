"""MindSpeed-LLM's parameter names and stacked experts, both ways; no upstream source is needed."""

from __future__ import annotations

import pytest
import torch

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory
from verl_patches.model.mindspeed import weights
from verl_patches.model.mindspeed.weights import NAMES, parse_name
from verl_patches.model.tiny import tiny_config


def test_every_hf_tensor_has_one_parameter_and_back():
    for parameter in build_inventory(tiny_config()).parameters:
        found = parse_name("module.module." + NAMES[parameter.kind].format(layer=parameter.layer))
        assert parameter.kind in found.kinds
        assert (found.layer, found.expert) == (parameter.layer, None)


def test_joined_tensors_come_in_the_order_of_their_rows():
    joined = {parse_name(name.format(layer=0)).kinds for name in NAMES.values()}
    mlps = ("routed_expert", "dense_mlp", "shared_expert")
    expected = {("q_a_proj", "kv_a_proj"), *((f"{mlp}_gate", f"{mlp}_up") for mlp in mlps)}
    assert {kinds for kinds in joined if len(kinds) > 1} == expected


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.0.self_attention.linear_q_down_proj.weight",
        "decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight",
        "decoder.layers.0.self_attention.linear_qk_nope.weight",
        "mtp_layers.0.final_layernorm.weight",
    ],
)
def test_names_of_other_libraries_and_modes_are_refused(name):
    with pytest.raises(ConfigError, match=r"not one of DeepSeek-V3's"):
        parse_name(name)


def test_stacked_experts_are_those_of_the_view():
    up = [torch.randn(6, 4, dtype=torch.float64) for _ in range(3)]  # [2F, H]; float32 sums differ by their order
    down = [torch.randn(4, 3, dtype=torch.float64) for _ in range(3)]  # [H, F]
    weight1 = torch.stack([expert.t() for expert in up]).view(4, -1)  # [e, H, 2F]
    weight2 = torch.cat([expert.t() for expert in down])
    assert weight1.shape == (4, 18) and weight2.shape == (9, 4)
    tokens = torch.randn(5, 4, dtype=torch.float64)
    for number in range(3):  # as GroupedMLP computes
        assert torch.allclose(tokens @ weight1.view(3, 4, -1)[number], tokens @ up[number].t())
        hidden = tokens @ up[number][:3].t()
        assert torch.allclose(hidden @ weight2.view(3, -1, 4)[number], hidden @ down[number].t())
    assert all(torch.equal(a, b) for a, b in zip(weights.split_up(weight1, 3), up, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(weights.split_down(weight2, 3), down, strict=True))
