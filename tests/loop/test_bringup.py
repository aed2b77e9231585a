"""Test the command `bringup` with real Ray, verl, Megatron and vLLM, and with faults that it must name."""

import json
import subprocess
import sys

import pytest
from loop_runs import ROOT, STREAMS, hook, smoke_command

from verl_patches.launch.bringup.bringup import RUNGS
from verl_patches.patching.spec import LEVELS

EMULATED = "recipe.line=a3", "recipe.platform=npu_emulated", "layout=tp2ep2", "rollout=tp2dp2"
FEATURES = (  # those of deepseekv3_16die, but for what is for bf16 alone
    "recipe.train.skip_old_log_prob=true",
    "recipe.train.moe_alltoall_overlap_comm=true",
    "recipe.train.gemm_gradient_accumulation_fusion=true",
    "recipe.memory.ledger=strict",
    "actor_rollout_ref.actor.megatron.param_offload=true",
    "actor_rollout_ref.actor.megatron.grad_offload=true",
    "actor_rollout_ref.ref.megatron.param_offload=true",
)


@pytest.fixture
def bringup(tmp_path, warm):
    """Return bringup(*arguments) -> (exit code, {rung: its row of the report}, {rung: figures}, the page's text)."""

    def run(*arguments):
        _, env = smoke_command(folder=tmp_path)
        words = [
            "bringup",
            "deepseekv3_tiny_cpu",
            *arguments,
            f"recipe.output_root={tmp_path}",
            "recipe.run=r",
            "--json",
        ]
        command = [sys.executable, "-m", "verl_patches", *words]
        done = subprocess.run(command, cwd=ROOT, env=warm(env), **STREAMS, timeout=3000)
        folder = tmp_path / "r_bringup"
        assert (folder / "bringup.json").is_file(), done.stdout[-3000:]
        report = json.loads((folder / "bringup.json").read_text())
        figures = {name: rung["figures"] for name, rung in report["rungs"].items()}
        return (
            done.returncode,
            {row["name"]: row for row in report["rows"]},
            figures,
            (folder / "bringup.md").read_text(),
        )

    return run


@pytest.fixture
def emulated(bringup, pytestconfig, a3_sources):
    """Return bringup for the emulated device, with the sources of --upstream."""
    a3_sources()
    folder = pytestconfig.getoption("--upstream")
    return lambda *arguments: bringup(*EMULATED, *arguments, "--upstream", str(folder))


@pytest.mark.slow
def test_the_rungs_before_a_kill_pass_on_line_pypi(bringup):
    code, rows, figures, page = bringup("--to", "levels")
    assert code == 0 and [*rows] == [*RUNGS][:4], rows
    assert {row["state"] for row in rows.values()} == {"fine"}
    assert "calls no operator of a device" in rows["operators"]["found"]
    assert {row["group"] for row in figures["groups"]["rows"]} == {"train experts", "train dp"}
    assert figures["levels"]["levels"]["plain"]["logprob_delta"] < 1e-5
    assert "not proved here, without a device" in page and "| levels | fine |" in page


@pytest.mark.slow
@pytest.mark.upstream
def test_a_wrong_scale_in_combine_is_named_by_the_rung_of_groups(emulated):
    code, rows, figures, _ = emulated(*FEATURES, hook("wrong_combine"), "--to", "levels")
    assert code == 1 and [row["state"] for row in rows.values()] == ["fine", "fine", "problem", "not run"], rows
    assert "npu_moe_distribute_combine on rank" in rows["groups"]["found"]
    assert len(figures["operators"]["rows"]) > 20 and {row["verdict"] for row in figures["groups"]["rows"]} == {"ok"}


@pytest.mark.nightly
@pytest.mark.upstream
def test_all_rungs_pass_at_all_levels(emulated):
    code, rows, figures, _ = emulated(*FEATURES)
    assert code == 0 and {row["state"] for row in rows.values()} == {"fine"}, rows
    assert [*figures["levels"]["levels"]] == [*LEVELS]
    assert all(level["logprob_delta"] < 1e-5 for level in figures["levels"]["levels"].values())
    assert figures["resume"]["resumed_step"] and figures["resume"]["saved_gb_s"] > 0


@pytest.mark.nightly
@pytest.mark.upstream
@pytest.mark.parametrize(
    ("fault", "rung", "words"),
    [
        ("wrong_rope", "operators", ("npu_interleave_rope on rank 0: wrong",)),
        ("slow_group", "groups", ("train tp of ranks [2, 3]: slow",)),
        ("swap_experts", "levels", ("level safe fails", "ReshardError", "experts.w2_weight on rank")),
        ("stale_kv", "levels", ("level reference fails", "WeightSyncError")),
    ],
)
def test_a_planted_fault_is_named_by_its_rung(emulated, fault, rung, words):
    code, rows, figures, page = emulated(*FEATURES, hook(fault), "--to", "levels")
    assert code == 1
    states = {name: row["state"] for name, row in rows.items()}
    assert states[rung] == "problem" and "problem" not in [state for name, state in states.items() if name != rung]
    assert all(each in rows[rung]["found"] for each in words), rows[rung]
    if fault == "stale_kv":  # decode graphs write them
        at_fault = figures["levels"]["levels"]["at_fault"]
        assert at_fault["parts"] == ["recipe.rollout.ascend.graphs"] and at_fault["confirmed"]
        assert "recipe.rollout.ascend.graphs=false" in page
