"""The inventory against the published numbers of DeepSeek-V3 671B, and against transformers' own model.

Golden numbers: DeepSeek-V3's config and card (huggingface.co/deepseek-ai/DeepSeek-V3).
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.layout.inventory import build_inventory, read_model_shape

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
BIG = build_inventory(MODELS / "deepseekv3_671b.json")
TINY_CONFIG = json.loads((MODELS / "deepseekv3_tiny.json").read_text())


def totals(inventory):
    """Elements of each part."""
    found = Counter()
    for parameter in inventory.parameters:
        found[parameter.part] += parameter.count
    return found


def test_671b_counts_are_exact():
    found = totals(BIG)
    assert found.total() == 671_026_419_200
    assert found.total() - found["routed_expert"] * 248 // 256 == 37_552_297_472  # active for one token
    assert found == {
        "embedding": 926_679_040,
        "head": 926_679_040,
        "attention": 61 * 187_107_328,
        "norm": 61 * 2 * 7168 + 7168,
        "router": 58 * (256 * 7168 + 256),  # the correction bias is in the published total
        "dense_mlp": 1_189_085_184,
        "shared_expert": 2_554_331_136,
        "routed_expert": 653_908_770_816,
    }
    assert sum(p.count for p in BIG.experts[3][0]) == 44_040_192
    assert len(BIG.by_name) == len(BIG.parameters) == 45_395


def test_correction_bias_is_fp32_and_not_trained():
    bias = BIG.by_name["model.layers.3.mlp.gate.e_score_correction_bias"]
    assert (bias.dtype, bias.shape, bias.trainable) == ("float32", (256,), False)
    others = [p for p in BIG.parameters if p.kind != "router_bias"]
    assert {p.dtype for p in others} == {"bfloat16"}
    assert all(p.trainable for p in others)


@pytest.mark.slow
def test_names_and_shapes_equal_transformers(run_python):
    """q_lora_rank null is compared with real Megatron and vLLM models instead: transformers 4.51 cannot build it."""
    big = json.loads((MODELS / "deepseekv3_671b.json").read_text())
    changes = [{}, {"first_k_dense_replace": 3}, {"n_shared_experts": 2}]
    configs = [TINY_CONFIG | change for change in changes] + [big | {"num_hidden_layers": 4}]
    code = """if True:
        import json, sys, torch
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM
        for config in json.loads(sys.argv[1]):
            with torch.device("meta"):
                model = DeepseekV3ForCausalLM(DeepseekV3Config(**config))
            print(json.dumps({name: list(t.shape) for name, t in model.state_dict().items()}))
    """
    lines = run_python(code, json.dumps(configs)).check().out.splitlines()
    assert len(lines) == len(configs)
    for config, line in zip(configs, lines, strict=True):
        assert {p.name: list(p.shape) for p in build_inventory(config).parameters} == json.loads(line)


def test_variants_of_the_config():
    plain = build_inventory(TINY_CONFIG)
    assert build_inventory(TINY_CONFIG | {"num_nextn_predict_layers": 1}) == plain  # MTP is never counted
    greedy = build_inventory(TINY_CONFIG | {"topk_method": "greedy"})
    assert totals(plain).total() - totals(greedy).total() == 3 * 16
    assert totals(build_inventory(TINY_CONFIG | {"n_shared_experts": None}))["shared_expert"] == 0
    assert build_inventory(read_model_shape(TINY_CONFIG)) == plain


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MODELS / "absent.json", "no such file"),
        (TINY_CONFIG | {"model_type": "llama"}, "found 'llama'"),
        ({"model_type": "deepseek_v3", "hidden_size": 8}, "num_hidden_layers"),
        (TINY_CONFIG | {"tie_word_embeddings": True}, "tie_word_embeddings must be false"),
        (TINY_CONFIG | {"torch_dtype": "int3"}, "torch_dtype"),
    ],
)
def test_other_configs_are_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        build_inventory(config)
