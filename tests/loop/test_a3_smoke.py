"""Test the loop on line a3: verl 54c9b736, Megatron core_r0.8.0, MindSpeed(-LLM) 2.0.0 from --upstream.

test_smoke.py checks proofs, status and weights of its main run.
"""

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.upstream]


def test_three_steps_with_the_pinned_sources(a3):
    summary = a3().summary
    assert summary["exit"] == "ok" and [s["step"] for s in summary["steps"]] == [1, 2, 3]
    assert (summary["line"], summary["platform"], summary["dtype"]) == ("a3", "cpu", "fp32")
    assert (summary["versions"]["verl"], summary["versions"]["megatron-core"]) == ("0.3.1.dev", "0.8.0")
    assert list(summary["upstream"]) == ["verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM"]


def test_both_lines_have_the_same_gradient_on_the_same_responses(smoke, a3):
    pypi = smoke()
    replayed = a3("--steps", "1", "--replay-rollout", str(pypi.folder))
    assert replayed.steps[0]["grad_norm"] == pytest.approx(pypi.steps[0]["grad_norm"], rel=1e-3)
    assert replayed.steps[0]["reward"] == pypi.steps[0]["reward"]
    assert replayed.steps[0]["logprob_delta"] is None  # they were not sampled with these weights


def test_without_a_row_of_this_line_the_truth_check_stops_the_run(a3):
    """Switch the resharder off, which derives MLA's projections itself: then row rollout.absorb_mla_again is needed."""
    run = a3("--steps", "1", "recipe.patches=[-reshard.*,-rollout.absorb_mla_again]", ok=False)
    assert run.code == 1 and "WeightSyncError: step 1" in run.summary["exit"]
