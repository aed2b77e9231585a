"""Line a3: the same loop with verl 54c9b736, Megatron core_r0.8.0, MindSpeed(-LLM) 2.0.0 from --upstream."""

import json
import subprocess
import sys

import pytest
from loop_runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.upstream]


def test_three_steps_with_the_pinned_sources(a3):
    summary = a3().summary
    assert summary["exit"] == "ok" and [s["step"] for s in summary["steps"]] == [1, 2, 3]
    assert (summary["line"], summary["platform"], summary["dtype"]) == ("a3", "cpu", "fp32")
    assert (summary["versions"]["verl"], summary["versions"]["megatron-core"]) == ("0.3.1.dev", "0.8.0")
    assert list(summary["upstream"]) == ["verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM"]


def test_weights_are_right_in_vllm_after_every_sync(a3):
    assert all(s["logprob_delta"]["mean"] < 1e-5 and s["grad_norm"] > 0 for s in a3().steps)


def test_every_process_proved_the_rows_of_this_line(a3):
    from verl_patches.catalog import NO_BUILD, ROWS  # NO_BUILD: off where flash_attn is installed, or never imported

    wanted = {r.id: r for r in ROWS if "a3" in r.lines and "cpu" in r.platforms and r not in NO_BUILD}
    of_pypi_only = {r.id for r in ROWS if "a3" not in r.lines}
    processes = set()
    for patch in a3().summary["patches"]:
        processes.add(patch["process"])
        if patch["id"] in wanted and patch["process"].split()[0] in wanted[patch["id"]].processes:
            assert patch["state"] == "active", patch
        elif patch["id"] in of_pypi_only:
            assert patch["state"] == "off", patch
    assert processes == {"controller", "worker 0", "worker 1"} and of_pypi_only


def test_status_of_the_run_from_the_command_line(a3):
    done = subprocess.run(
        [sys.executable, "-m", "verl_patches", "status", "--run", str(a3().folder), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0 and found["wrong"] == []
    row = next(r for r in found["rows"] if r["id"] == "update.engine_start")
    assert row["states"]["worker 0"] == "active" and row["states"]["controller"] == "active"


def test_both_lines_have_the_same_gradient_on_the_same_responses(smoke, a3):
    pypi = smoke()
    replayed = a3("--steps", "1", "--replay-rollout", str(pypi.folder))
    assert replayed.steps[0]["grad_norm"] == pytest.approx(pypi.steps[0]["grad_norm"], rel=1e-3)
    assert replayed.steps[0]["reward"] == pypi.steps[0]["reward"]
    assert replayed.steps[0]["logprob_delta"] is None  # nobody sampled them with these weights


def test_without_a_row_of_this_line_the_truth_check_stops_the_run(a3):
    """The resharder derives MLA's projections itself: without it, row rollout.absorb_mla_again is needed."""
    run = a3("--steps", "1", "recipe.patches=[-reshard.*,-rollout.absorb_mla_again]", ok=False)
    assert run.code == 1 and "WeightSyncError: step 1" in run.summary["exit"]


def test_a_skipped_sync_is_caught_at_the_first_step_that_skips(a3):
    """Row update.sharding_manager."""
    run = a3("--steps", "3", "recipe.weight_sync.enabled=false", ok=False)
    assert run.steps[0]["logprob_delta"]["mean"] < 1e-5
    assert run.code == 1 and "WeightSyncError: step 2" in run.summary["exit"]
