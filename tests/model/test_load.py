"""Test our Megatron DeepSeek-V3 against transformers' on the tiny model, at every layout, with negative controls."""

import pytest
import torch

from tests.model import parity
from tests.ranks import RankError

LAYOUTS = {
    "pp2": {"pp": 2},  # pipelines first: Megatron forgets to reset the ranks of the embedding groups between layouts
    "pp2uneven": {"pp": 2, "overrides": {"num_layers_in_first_pipeline_stage": 1}},
    "tp1": {},
    "tp2": {"tp": 2},
    "ep2": {"ep": 2},
    "tp2ep2": {"tp": 2, "ep": 2, "etp": 1},
}
LEFT_OUT = {
    "groups": {"moe_router_num_groups": None, "moe_router_group_topk": None},
    "mscale": {"mscale": 0.0, "mscale_all_dim": 0.0},
    "yarn": {"rope_type": "rope"},
    "bias": {},
}
TOLERANCE = 1e-4
WORKER = {"patches": "line=pypi,platform=cpu", "backend": "nccl"}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def layouts(reference, run_ranks):
    """Return each rank's findings at every layout, from one launch."""
    return run_ranks("tests.model.parity_job:layouts_job", reference["folder"], LAYOUTS, size=2, **WORKER)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("form", ["packed", "padded"])
def test_logits_equal_transformers(reference, layouts, layout, form):
    found = [rank[layout][form] for rank in layouts if rank[layout][form] is not None]
    assert len(found) == (1 if layout.startswith("pp2") else 2)
    assert max(parity.logits_error(reference, logits) for logits in found) <= TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_equal_transformers(reference, layouts, layout):
    errors = parity.gradient_errors(reference["gradients"], parity.whole_gradients(layouts, layout))
    assert max(errors.values()) <= 1e-4, sorted(errors.items(), key=lambda e: -e[1])[:5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_sent_to_rollout_are_the_files(reference, layouts, layout):
    sent = layouts[0][layout]["synced"]
    assert sent.keys() == reference["weights"].keys()
    wrong = [name for name, tensor in sent.items() if not torch.equal(tensor, reference["weights"][name])]
    assert not wrong


def test_without_row_mla_k_pe_grad_gradients_are_wrong_under_tp(reference, run_ranks):
    run = {"size": 2, "backend": "nccl", "patches": "line=pypi,platform=cpu,-model.mla_k_pe_grad"}
    ranks = run_ranks("tests.model.parity_job:layouts_job", reference["folder"], {"tp2": {"tp": 2}}, **run)
    assert parity.logits_error(reference, ranks[0]["tp2"]["packed"]) <= TOLERANCE
    errors = parity.gradient_errors(reference["gradients"], parity.whole_gradients(ranks, "tp2"))
    wrong = {name for name, error in errors.items() if error > 1e-3}
    assert {f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight" for layer in range(4)} <= wrong


def test_without_row_local_names_verls_converter_knows_no_local_name(reference, run_ranks):
    run = {"backend": "nccl", "patches": "line=pypi,platform=cpu,-model.local_names"}
    with pytest.raises(RankError, match="q_layernorm"):
        run_ranks("tests.model.parity_job:layouts_job", reference["folder"], {"tp1": {}}, **run)


def test_leaving_something_out_fails_parity(reference, run_ranks):
    found = run_ranks("tests.model.parity_job:controls_job", reference["folder"], LEFT_OUT, **WORKER)[0]
    errors = {name: parity.logits_error(reference, logits) for name, logits in found.items()}
    assert errors.pop("nothing") <= TOLERANCE
    assert min(errors.values()) > 100 * TOLERANCE, errors


def test_correction_bias_stays_fp32_and_still_in_bf16(reference, run_ranks):
    for rank in run_ranks("tests.model.parity_job:bf16_job", reference["folder"], size=2, **WORKER):
        assert "sequence_parallel=True (found False)" in rank["refused"]  # by row model.mla_k_pe_grad
        assert rank["dtypes"] == {"torch.bfloat16"}
        assert len(rank["loaded"]) == 3
        for name, bias in rank["loaded"].items():
            layer = name.split(".")[2]
            expected = reference["weights"][f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
            assert bias.dtype == torch.float32
            assert torch.equal(bias, expected)
            assert torch.equal(rank["after"][name], expected)
        assert 1e-4 < parity.logits_error(reference, rank["logits"].float()) < 0.5
