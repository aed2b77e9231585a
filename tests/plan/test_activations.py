"""Test the activation formulas against autograd's saved bytes in real layers of line a3, and in the plan."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from verl_patches.layout.inventory import read_model_shape
from verl_patches.layout.parallel import ParallelLayout, parse_layout
from verl_patches.model import log_prob
from verl_patches.plan import activations
from verl_patches.plan.activations import Passes, forward_bytes, layer_terms, logits_bytes, update_bytes

MODELS = Path(__file__).resolve().parents[2] / "configs" / "model"
BIG = read_model_shape(MODELS / "deepseekv3_671b.json")
TRAIN = parse_layout("tp4 pp8 ep32 etp1 @256 layers=7,7,8,8,8,8,8,7")
# all sizes differ, so that no term is mistaken for another; layers 0 and 1 are dense, 2 and 3 have experts
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
MEASURED["cp2"] = (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2})  # a rank has half of the tokens
MEASURED["tp2_overlapped"] = (2, {**MEASURED["tp2_extends_ep"][1], "train": {"moe_alltoall_overlap_comm": True}})
MEASURED["tp2_without_q_lora"] = MEASURED["tp2_extends_ep"]
# switches that the public recipe's script for random weights sets too (docs/plan.md, Recompute)
_PUBLIC = dict.fromkeys(("moe_alltoall_overlap_comm", "gemm_gradient_accumulation_fusion", "balanced_routing"), True)
MEASURED["tp2_published"] = (2, {**MEASURED["tp2_extends_ep"][1], "train": _PUBLIC})


@pytest.fixture(scope="module")
def saved(a3_sources, run_ranks, tmp_path_factory):
    """Return saved(case of MEASURED) -> (model, layout, {tokens: {layer: mean bytes of the ranks}})."""
    from tests.model.mindspeed_start import engine_config

    def measure(case):
        ranks, changes = MEASURED[case]
        folder = tmp_path_factory.mktemp("model")
        text = json.loads((MODELS / "deepseekv3_tiny.json").read_text()) | SIZES
        if case.endswith("without_q_lora"):
            text["q_lora_rank"] = None
        (folder / "config.json").write_text(json.dumps(text))
        sources = a3_sources()
        config = engine_config(folder, sources[0], ranks, dict(changes), "bf16")
        env = {"VERL_PATCHES": "line=a3,platform=cpu", "PYTHONPATH": os.pathsep.join(map(str, sources))}
        call = "tests.plan.saved_job:saved_by_layers", config, folder, TOKENS, case.endswith("published")
        found = run_ranks("tests.model.mindspeed_start:run", *call, size=ranks, env=env, backend=None)
        cp = changes.get("context_parallel_size", 1)
        layout = ParallelLayout(ranks, tp=ranks // cp, cp=cp, ep=ranks, etp=1)
        means = {n: {i: sum(rank[n][i] for rank in found) / ranks for i in found[0][n]} for n in TOKENS}
        return read_model_shape(text), layout, means

    return measure


@pytest.mark.slow
@pytest.mark.upstream
@pytest.mark.parametrize("name", MEASURED)
def test_a_layer_saves_what_the_formulas_say(saved, name, monkeypatch):
    model, layout, means = saved(name)
    if name.endswith("published"):  # layout BNSD pads values to the width of the keys, not all of them to 128
        monkeypatch.setattr(activations, "_FLASH_WIDTH", 1)
    for tokens, layers in means.items():
        for layer, size_bytes in layers.items():
            local = tokens // layout.cp
            terms = layer_terms(model, model.is_moe(layer), local, layout, unpadded=name == "tp1_unpadded")
            assert sum(terms.values()) == pytest.approx(size_bytes, rel=0.02), (tokens, layer, terms)
            for term, part in terms.items():  # control: without a large term the sum is wrong
                assert part < 0.04 * size_bytes or sum(terms.values()) - part != pytest.approx(size_bytes, rel=0.02), (
                    term
                )


RUN = Passes(4096, 4096, 4096, micro_batches=1024, recompute_layers=8, imbalance=1.0)


def test_the_256_die_update_written_out():
    """Compute it by hand: b 2, T 4096, tp 4, s 1024, H 7168; 8 rows of a token; a die has 32 heads of width 256."""
    layer = layer_terms(BIG, True, 4096, TRAIN)
    assert layer["attention"] == 2 * 4096 * 32 * (4 * 256 + 128) + 4096 * 32 * 64
    assert layer["experts"] == 2 * 8192 * (2 * 7168 + 3 * 2048) + 2 * 8192 * 7168
    assert layer["norms"] == 4 * 2 * 1024 * 7168 + 8 * 1024
    assert layer["router"] == 4 * (1024 + 256) * 7168 + 4096 * ((4 + 1) * 256 + 20 * 8 + 64)
    found = update_bytes(BIG, TRAIN, 0, 8, RUN)
    assert found["kept_activations"] == 8 * 7 * 2 * 1024 * 7168  # 8 micro batches in flight, inputs of 7 layers
    assert update_bytes(BIG, TRAIN, 3, 8, RUN)["kept_activations"] == 5 * 8 * 2 * 1024 * 7168
    assert found["weight_gradient"] == 2 * 8 * 7168 * 4096 and found["logits"] == 0
    logits = logits_bytes(BIG, 4096, TRAIN, RUN, gradient=True, entropy=False)
    assert logits == 6 * 4096 * 32320 + 2 * (8 << 20) + 2 * 4096 * 7168


def test_keys_change_the_activations():
    stage = 1
    kept = update_bytes(BIG, TRAIN, stage, 8, RUN)

    def update_with(**changes):
        return update_bytes(BIG, TRAIN, stage, 8, replace(RUN, **changes))

    nothing = update_with(recompute_layers=0)
    assert nothing["kept_activations"] > 20 * kept["kept_activations"]
    assert nothing["working_activations"] < kept["working_activations"]
    two = update_with(micro_batches=2)
    assert two["kept_activations"] * 7 == kept["kept_activations"] * 2  # stage 1 of 8 has 7 in flight
    assert update_with(update_tokens=8192)["kept_activations"] == 2 * kept["kept_activations"]
    together = update_with(recompute_layers=8, recompute_together=7)
    assert together["kept_activations"] * 7 == kept["kept_activations"]
    assert together["working_activations"] > 3 * kept["working_activations"]
    assert update_with(imbalance=2.0)["working_activations"] > kept["working_activations"]
    assert update_with(gemm_gradient_accumulation_fusion=True)["weight_gradient"] == 0
    assert update_with(unpadded=True)["working_activations"] < kept["working_activations"]


def test_logits_of_the_last_stage():
    """Check that the larger of logits and a layer's work counts; verl's own functions take more beside the logits."""
    verl = replace(RUN, chunked_logits=False)
    found = forward_bytes(BIG, TRAIN, 7, 4096, RUN, entropy=True)
    assert found["logits"] > 0 == found["working_activations"]
    assert forward_bytes(BIG, TRAIN, 6, 4096, RUN, entropy=True)["logits"] == 0
    fp32 = 4 * 4096 * 32320
    for entropy, tensors in ((False, 1), (True, 2)):
        ours, theirs = (logits_bytes(BIG, 4096, TRAIN, p, gradient=False, entropy=entropy) for p in (RUN, verl))
        assert theirs - ours == tensors * (fp32 - 2 * (8 << 20))


def test_the_chunk_of_logits_is_that_of_the_log_probs():
    assert activations.CHUNK_BYTES == log_prob.CHUNK_BYTES  # activations.py imports no torch
