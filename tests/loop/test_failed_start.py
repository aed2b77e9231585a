"""A row that cannot be put in place in one kind of process ends the whole start, soon and with its own words."""

import json
import subprocess
import sys
import time

import pytest
from loop_runs import ROOT, smoke_command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("hook", "row"), [("drifted_in_workers", "model.train_dtype"), ("drifted_in_the_hook", "update.log_with_run")]
)
def test_the_rows_own_error_within_ten_seconds(tmp_path, hook, row):
    command, env = smoke_command(
        "--steps", "1", f"recipe.worker_process_setup_hook=odd_worker.{hook}", folder=tmp_path, run="r"
    )
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**env, "FAILED_AT": str(tmp_path / "failed_at")},
        timeout=400,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    seconds = time.time() - float((tmp_path / "failed_at").read_text())
    reason = json.loads((tmp_path / "r" / "summary.json").read_text())["exit"]
    assert done.returncode == 1 and reason.startswith("verl_patches.patching.engine.PatchError"), reason
    assert f"row {row}: " in reason and "has drifted: its body is not the reviewed one: expected 0000" in reason
    assert reason.splitlines()[0] in done.stdout + done.stderr
    assert seconds < 10, f"the run ended {seconds:.1f} s after the failure"


def test_the_drivers_own_failure_needs_no_ray(tmp_path):
    command = [sys.executable, "-m", "verl_patches.main_grpo", "--config-name", "grpo_deepseekv3_tiny_cpu"]
    env = {**smoke_command(folder=tmp_path, run="r")[1], "VERL_PATCHES": "line=pypi,platform=cpu,-no.such_row"}
    done = subprocess.run(
        command, cwd=ROOT, env=env, timeout=60, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 1 and "no.such_row" in done.stderr.splitlines()[-1] and "raylet" not in done.stderr
