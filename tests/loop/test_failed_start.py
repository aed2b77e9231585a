"""A row that cannot be applied in one kind of process ends the whole start within seconds, with its own error."""

import json
import subprocess
import sys
import time

import pytest
from loop_runs import ROOT, STREAMS, hook, smoke_command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "row"), [("drifted_in_workers", "model.train_dtype"), ("drifted_in_the_hook", "update.log_with_run")]
)
def test_the_rows_own_error_before_verl_stops_waiting(tmp_path, warm, name, row):
    command, env = smoke_command("--steps", "1", hook(name), folder=tmp_path)
    env = warm(env)
    env["FAILED_AT"] = str(tmp_path / "failed_at")
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=400, **STREAMS)
    seconds = time.time() - float((tmp_path / "failed_at").read_text())
    reason = json.loads((tmp_path / "r" / "summary.json").read_text())["exit"]
    assert done.returncode == 1 and reason.startswith("verl_patches.patching.engine.PatchError"), reason
    assert f"row {row}: " in reason and "has drifted: its body is not the reviewed one: expected 0000" in reason
    assert reason.splitlines()[0] in done.stdout
    assert seconds < 150, f"the run ended {seconds:.1f} s after the failure"


def test_the_drivers_own_failure_needs_no_ray(tmp_path):
    command = [sys.executable, "-m", "verl_patches.main_grpo", str(tmp_path / "config.yaml")]
    env = {**smoke_command(folder=tmp_path)[1], "VERL_PATCHES": "line=pypi,platform=cpu,-no.such_row"}
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=60, **STREAMS)
    assert done.returncode == 1 and "no.such_row" in done.stdout.splitlines()[-1] and "raylet" not in done.stdout
