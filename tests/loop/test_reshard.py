"""Test the resharder in the real loop: its bytes, its verification, and that verl's own path still works."""

import pytest
from loop_runs import BUCKET_BYTES, TP2EP2, hook, read_metrics

pytestmark = pytest.mark.slow


def test_a_step_reports_what_its_sync_moved(smoke):
    run = smoke()
    first, later = run.steps[0]["sync"], run.steps[1]["sync"]
    assert first["verified"] and not later["verified"]  # recipe.reshard.verify=first
    assert first["learnt"] and not later["learnt"]
    moved = later["received_bytes"]
    assert 0 < moved["mean"] <= moved["max"] and later["sent_bytes"]["mean"] == moved["mean"]
    assert later["collectives"] == 1 and 0 < later["peak_extra_bytes"] < 4 * (512 << 20)
    assert later["seconds"]["total"] <= run.steps[1]["seconds"]["reshard"] + 1e-3
    table = run.progress
    assert "sync MB" in table and f"{moved['max'] / 1e6:.3f}" in table


def test_verls_own_path_gives_the_same_steps(smoke):
    """Compare on line pypi; test_emulated_npu.py compares on line a3."""
    verls, ours = smoke("recipe.patches=[-reshard.*]"), smoke()
    assert all(s["sync"] is None for s in verls.steps)
    assert read_metrics(verls, "grad_norm", "logprob_delta") == read_metrics(ours, "grad_norm", "logprob_delta")


def test_small_buckets_many_ranks_and_everything_offloaded(smoke):
    """Check the run of test_layouts.py, which compares its weights and its gradient."""
    run = smoke(*TP2EP2)
    assert all(s["seconds"]["offload"] > 0 for s in run.steps)
    sync = run.steps[1]["sync"]
    assert not sync["learnt"]  # memory that comes back is known
    assert sync["collectives"] > 2 and sync["peak_extra_bytes"] <= 4 * BUCKET_BYTES


def test_a_spoilt_map_stops_the_run_by_name(smoke):
    run = smoke("--steps", "1", hook("swap_experts"), ok=False)
    assert run.code == 1 and not run.steps
    for words in ("model.layers.2.mlp.experts.w2_weight", "loaded again", "expected", "found", "rank"):
        assert words in run.summary["exit"], run.summary["exit"]
