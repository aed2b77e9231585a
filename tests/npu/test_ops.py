"""The NPU ops on the plain-torch references: they run, guards refuse, the grouped matmul's gradients are right."""

import pytest

pytestmark = pytest.mark.slow


def test_every_case_has_outputs_and_gradients(references):
    assert references["made by"].startswith("verl_patches.platform.cpu.") and len(references["cases"]) > 10
    for case, found in references["cases"].items():
        assert "output 0" in found and None not in found.values(), case
    assert len(references["cases"]["layer"]) == 16  # the output, x and 14 parameters


def test_guards_refuse_every_bad_call(references):
    assert [name for name, found in references["bad"].items() if not str(found["ours"]).startswith("ConfigError")] == []


def test_grouped_matmul_is_a_loop_over_experts(references):
    assert set(references["grouped_matmul"]) == {"y", "gradient x", "gradient weight"}
    assert max(references["grouped_matmul"].values()) < 1e-12
