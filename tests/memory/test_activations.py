"""Activations: the formulas against what autograd saves in real layers of line a3, and their use in the plan."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from verl_patches.layout.inventory import read_model_shape
from verl_patches.layout.parallel import ParallelLayout, parse_layout
from verl_patches.memory.activations import layer_terms

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
BIG = read_model_shape(MODELS / "deepseekv3_671b.json")
TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")
# every size another one, so that no term hides in another; layers 0 and 1 are dense, 2 and 3 have experts
SIZES = {
    "hidden_size": 192, "intermediate_size": 320, "moe_intermediate_size": 56, "n_shared_experts": 2,
    "q_lora_rank": 96, "kv_lora_rank": 48, "qk_nope_head_dim": 40, "qk_rope_head_dim": 16, "v_head_dim": 24,
    "first_k_dense_replace": 2,
}  # fmt: skip
TOKENS = [96, 256]
MEASURED = {
    "tp1": (1, {}),
    "tp1_unpadded": (1, {"train": {"unpadded_attention": True}}),
    "tp2_extends_ep": (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "split": "tp_extend_ep"}),
}


@pytest.fixture(scope="module", params=MEASURED)
def measured(request, a3_sources, run_ranks, tmp_path_factory):
    """(name, model, layout, {tokens: {layer: mean bytes of the ranks}})."""
    from tests.model.mindspeed_start import engine_config

    ranks, sizes = MEASURED[request.param]
    folder = tmp_path_factory.mktemp("model")
    text = json.loads((MODELS / "deepseekv3_tiny.json").read_text()) | SIZES
    (folder / "config.json").write_text(json.dumps(text))
    sources = a3_sources()
    config = engine_config(folder, sources[0], ranks, dict(sizes), "bf16")
    env = {"VERL_PATCHES": "line=a3,platform=cpu", "PYTHONPATH": os.pathsep.join(map(str, sources))}
    call = "tests.memory.saved_job:saved_by_layers", config, folder, TOKENS
    found = run_ranks("tests.model.mindspeed_start:run", *call, size=ranks, env=env, backend=None, timeout_s=200)
    layout = ParallelLayout(ranks, tp=ranks, ep=ranks, etp=1)
    means = {n: {i: sum(rank[n][i] for rank in found) / ranks for i in found[0][n]} for n in TOKENS}
    return request.param, read_model_shape(text), layout, means


@pytest.mark.slow
@pytest.mark.upstream
def test_a_layer_saves_what_the_formulas_say(measured):
    name, model, layout, means = measured
    for tokens, layers in means.items():
        for layer, size_bytes in layers.items():
            terms = layer_terms(model, model.is_moe(layer), tokens, layout, unpadded=name == "tp1_unpadded")
            assert sum(terms.values()) == pytest.approx(size_bytes, rel=0.02), (tokens, layer, terms)
            for term, part in terms.items():  # control: no term of weight can be missing
                assert part < 0.04 * size_bytes or sum(terms.values()) - part != pytest.approx(size_bytes, rel=0.02), (
                    term
                )
