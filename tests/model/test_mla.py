"""Row model.mla_k_pe_grad: without it log-probs agree under TP and gradients do not."""

import json
import shutil

import pytest

ROW = "model.mla_k_pe_grad"


@pytest.mark.slow
def test_without_the_row_gradients_are_wrong_under_tp(reference, run_ranks, parity, tmp_path):
    shutil.copytree(reference["folder"] / "model", tmp_path / "model")
    shutil.copy(reference["folder"] / "batch.pt", tmp_path)
    (tmp_path / "layouts.json").write_text(json.dumps({"tp2": {"tp": 2}}))
    ranks = run_ranks("parity_job.py:layouts_job", tmp_path, switches=f",-{ROW}")
    assert parity.logits_error(reference, ranks[0]["tp2"]["packed"]) <= 1e-4
    errors = parity.gradient_errors(reference["gradients"], parity.whole_gradients(ranks, "tp2"))
    wrong = {name for name, error in errors.items() if error > 1e-3}
    assert {f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight" for layer in range(4)} <= wrong
