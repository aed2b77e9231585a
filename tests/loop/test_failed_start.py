"""Test that a patch that fails in one kind of process ends the start with its own error, not verl's time-out."""

import json
import subprocess
import sys

import pytest
from loop_runs import ROOT, STREAMS, hook, smoke_command

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "row"), [("drifted_in_workers", "model.train_dtype"), ("drifted_in_the_hook", "update.log_with_run")]
)
def test_the_rows_own_error_before_verl_stops_waiting(tmp_path, warm, name, row):
    command, env = smoke_command("--steps", "1", hook(name), folder=tmp_path)
    done = subprocess.run(command, cwd=ROOT, env=warm(env), **STREAMS)
    reason = json.loads((tmp_path / "r" / "latest" / "summary.json").read_text())["exit"]
    assert done.returncode == 1 and reason.startswith("verl_patches.patching.engine.PatchError"), reason
    assert f"row {row}: " in reason and "has drifted" in reason and reason.splitlines()[0] in done.stdout
    after_300_s = "Failed to get register_center_actor"
    assert after_300_s not in (tmp_path / "r" / "latest" / "driver.log").read_text()


def test_the_drivers_own_failure_needs_no_ray(tmp_path):
    command = [sys.executable, "-m", "verl_patches.main", str(tmp_path)]
    env = {**smoke_command(folder=tmp_path)[1], "VERL_PATCHES": "line=pypi,platform=cpu,-no.such_row"}
    done = subprocess.run(command, cwd=ROOT, env=env, **STREAMS)
    assert done.returncode == 1 and "no.such_row" in done.stdout.splitlines()[-1] and "raylet" not in done.stdout
