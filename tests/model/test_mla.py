"""Row model.mla_k_pe_grad: without it log-probs agree under TP and gradients do not."""

import pytest

from tests.model import parity

ROW = "model.mla_k_pe_grad"


@pytest.mark.slow
def test_without_the_row_gradients_are_wrong_under_tp(reference, run_ranks):
    ranks = run_ranks(
        "tests.model.parity_job:layouts_job",
        reference["folder"],
        {"tp2": {"tp": 2}},
        size=2,
        backend="nccl",
        patches=f"line=pypi,platform=cpu,-{ROW}",
    )
    assert parity.logits_error(reference, ranks[0]["tp2"]["packed"]) <= 1e-4
    errors = parity.gradient_errors(reference["gradients"], parity.whole_gradients(ranks, "tp2"))
    wrong = {name for name, error in errors.items() if error > 1e-3}
    assert {f"model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight" for layer in range(4)} <= wrong
