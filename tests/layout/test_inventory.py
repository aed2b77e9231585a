"""Test the inventory against the published numbers of DeepSeek-V3 671B, and against transformers' own model.

Golden numbers: DeepSeek-V3's config and card (huggingface.co/deepseek-ai/DeepSeek-V3).
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory, read_model_shape
from verl_patches.layout.model_folder import read_config

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
BIG_CONFIG = json.loads((MODELS / "deepseekv3_671b.json").read_text())
BIG = build_inventory(BIG_CONFIG)
TINY_CONFIG = json.loads((MODELS / "deepseekv3_tiny.json").read_text())


def counts(inventory):
    """Return the elements of each part."""
    total = Counter()
    for parameter in inventory.parameters:
        total[parameter.part] += parameter.count
    return total


def test_671b_counts_are_exact():
    elements = counts(BIG)
    assert elements.total() == 671_026_419_200
    assert elements.total() - elements["routed_expert"] * 248 // 256 == 37_552_297_472  # active for one token
    assert elements["attention"] == 61 * 187_107_328
    assert elements["router"] == 58 * (256 * 7168 + 256)  # the correction bias is in the published total
    assert len(BIG.by_name) == len(BIG.parameters) == 45_395


@pytest.mark.parametrize(("name", "total"), [("moonlight_16b", 15_960_110_208), ("kimi_k2", 1_026_408_232_448)])
def test_the_totals_of_the_family_are_the_published_ones(name, total):
    """Check Moonlight's index, 2 bytes each and 27 fp32 tables of 32 frequencies, and the hub's count of Kimi-K2."""
    inventory = build_inventory(read_config(MODELS / f"{name}.json"))
    assert counts(inventory).total() == total
    assert name == "kimi_k2" or total + 27 * 32 * 4 // 2 == 15_960_111_936


def test_only_the_correction_bias_is_fp32_and_not_trained():
    bias = BIG.by_name["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert (bias.dtype, bias.shape, bias.trainable) == ("float32", (256,), False)
    assert {(p.dtype, p.trainable) for p in BIG.parameters if p.kind != "router_bias"} == {("bfloat16", True)}


@pytest.mark.slow
def test_names_and_shapes_equal_transformers(run_python):
    """Leave out q_lora_rank null, which transformers 4.51 cannot build: tests/model/test_family.py has it."""
    changes = [{}, {"first_k_dense_replace": 3}, {"n_shared_experts": 2}]
    configs = [TINY_CONFIG | change for change in changes] + [BIG_CONFIG | {"num_hidden_layers": 4}]
    code = """if True:
        import json, sys, torch
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        for config in json.loads(sys.argv[1]):
            with torch.device("meta"):
                model = DeepseekV3ForCausalLM(DeepseekV3Config(**config))
            print(json.dumps({name: list(t.shape) for name, t in model.state_dict().items()}))
    """
    lines = run_python(code, json.dumps(configs)).check().out.splitlines()
    for config, line in zip(configs, lines, strict=True):
        assert {p.name: list(p.shape) for p in build_inventory(config).parameters} == json.loads(line)


def test_variants_of_the_config():
    plain = build_inventory(TINY_CONFIG)
    assert build_inventory(TINY_CONFIG | {"num_nextn_predict_layers": 1}) == plain  # MTP layers are never counted
    greedy = build_inventory(TINY_CONFIG | {"topk_method": "greedy"})
    assert counts(plain).total() - counts(greedy).total() == 3 * 16
    assert counts(build_inventory(TINY_CONFIG | {"n_shared_experts": None}))["shared_expert"] == 0


@pytest.mark.parametrize(("content", "words"), [
    (b"", "is empty"), (b"{]", "cannot be read as JSON"), (b"[1]", "expected a JSON object, found list"),
])  # fmt: skip
def test_a_config_json_that_cannot_be_read_is_refused(tmp_path, content, words):
    with pytest.raises(ConfigError, match="config.json does not exist"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_model_shape(tmp_path)


@pytest.mark.parametrize(("change", "words"), [
    ({"model_type": "deepseek_v2"}, "model_type is 'deepseek_v2', expected 'deepseek_v3' or 'kimi_k2'"),
    ({"scoring_func": "softmax"}, "scoring_func is 'softmax', expected 'sigmoid'"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
     "quantization_config has quant_method 'compressed-tensors', expected 'fp8'"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
    ({"torch_dtype": "int3"}, "torch_dtype"),
    ({"num_hidden_layers": -1}, "num_hidden_layers is -1; expected a whole number >= 1"),
    ({"num_experts_per_tok": 10**6}, "num_experts_per_tok is 1000000; expected at most n_routed_experts"),
])  # fmt: skip
def test_another_model_or_a_wrong_size_is_refused_by_its_key(tmp_path, change, words):
    """Check the reader of runs, plans and data tools."""
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | change))
    with pytest.raises(ConfigError, match=words):
        build_inventory(tmp_path)
