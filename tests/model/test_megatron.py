"""Test row model.config, the config converter, and names that reshard/parameters.py refuses."""

import pytest
from readme_tables import MODELS

from verl_patches.errors import ConfigError
from verl_patches.layout.model_folder import read_config
from verl_patches.reshard.parameters import parse_name
from verl_patches.run.resolve import CONFIGS_DIR

WRONG = [
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
    ({"topk_method": "greedy"}, "topk_method is 'greedy', expected 'noaux_tc'"),
    ({"norm_topk_prob": False}, "norm_topk_prob is False, expected True"),
    ({"num_experts_per_tok": 6}, "num_experts_per_tok must be 2 * topk_group"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 40.0}}, '"type": "yarn"'),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 40.0}}, "mscale and mscale_all_dim must be given"),
    ({"rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.7}}, "mscale and mscale_all_dim"),
]
# {key of config.json: field of Megatron's configuration}
MEGATRON_FIELDS = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "first_k_dense_replace": "moe_layer_freq",
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "moe_ffn_hidden_size",
    "n_routed_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "n_shared_experts": "moe_shared_expert_intermediate_size",
    "n_group": "moe_router_num_groups",
    "topk_group": "moe_router_group_topk",
    "routed_scaling_factor": "moe_router_topk_scaling_factor",
    "num_attention_heads": "num_attention_heads",
    "q_lora_rank": "q_lora_rank",
    "rms_norm_eps": "layernorm_epsilon",
    "rope_theta": "rotary_base",
}
FAMILY = {name: read_config(CONFIGS_DIR / "model" / f"{name}.json") for name in MODELS}
CASES = [({}, {}), ({}, {"moe_router_bias_update_rate": 0.001}), ({"n_group": 1}, {}), *((c, {}) for c, _ in WRONG)]
CASES += [(hf, {}) for hf in FAMILY.values()]


@pytest.fixture(scope="module")
def convert(run_ranks, tiny_model):
    """Return convert(switches), the config fields, or the error, of every case."""
    job = "tests.model.megatron_model:converted"
    return lambda switches="": run_ranks(job, tiny_model, CASES, patches="line=pypi,platform=cpu" + switches)[0]


@pytest.mark.slow
def test_groups_router_and_balancing(convert):
    plain, overridden, ungrouped, *refused = convert()[: -len(FAMILY)]
    assert (plain["moe_router_num_groups"], plain["moe_router_group_topk"]) == (4, 2)
    assert plain["moe_router_dtype"] == "fp32"
    assert plain["moe_router_load_balancing_type"] == "none"
    assert plain["moe_aux_loss_coeff"] == 0
    assert plain["moe_router_bias_update_rate"] == 0
    # verl's own converter converts yarn correctly
    assert plain["rope_type"] == "yarn"
    assert plain["max_position_embeddings"] == 64
    assert (plain["rotary_scaling_factor"], plain["beta_fast"], plain["beta_slow"]) == (40, 32, 1)
    assert (plain["mscale"], plain["mscale_all_dim"]) == (1, 1)
    assert overridden["moe_router_bias_update_rate"] == 0.001  # an override replaces our value
    assert ungrouped["moe_router_num_groups"] is None
    for (_, message), found in zip(WRONG, refused, strict=True):
        assert message in found


@pytest.mark.slow
def test_the_fields_of_the_family_are_those_of_config_json(convert):
    for hf, found in zip(FAMILY.values(), convert()[-len(FAMILY) :], strict=True):
        dense, shared = hf["first_k_dense_replace"], hf["n_shared_experts"] * hf["moe_intermediate_size"]
        made = hf | {"n_shared_experts": shared}
        made["first_k_dense_replace"] = [0] * dense + [1] * (hf["num_hidden_layers"] - dense)
        if hf["n_group"] == 1:
            made |= {"n_group": None, "topk_group": None}
        assert {key: found[field] for key, field in MEGATRON_FIELDS.items()} == {
            key: made[key] for key in MEGATRON_FIELDS
        }
        assert found["rotary_scaling_factor"] == hf["rope_scaling"]["factor"]


@pytest.mark.slow
def test_without_the_row_groups_are_dropped(convert):
    plain, *_, unequal_mscale = convert(",-model.config")[: -len(FAMILY)]
    assert plain["moe_router_num_groups"] is None
    assert plain["moe_router_dtype"] == "fp64"
    assert plain["moe_router_load_balancing_type"] == "seq_aux_loss"
    assert isinstance(unequal_mscale, dict)  # accepted, but Megatron would scale the softmax wrongly


@pytest.mark.parametrize(
    ("library", "name"),
    [("megatron-local", "decoder.layers.1.mlp.experts.weight1"), ("mindspeed", "mtp_layers.0.final_layernorm.weight")],
)
def test_names_of_other_models_libraries_and_modes_are_refused(library, name):
    with pytest.raises(ConfigError, match=f"{name}' is not a DeepSeek-V3 parameter"):
        parse_name(name, library)
