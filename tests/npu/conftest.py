"""Make each call of cases.py once: on the references here, on the real torch_npu by job.py in its own Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu.cases import CASES, outcome
from verl_patches.emulation.ascend.packages import torch_npu

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
QUIET = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}


def run_program(python: str, *command: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Run a program of this folder; fail the test with the end of its output unless it exits 0."""
    done = subprocess.run([python, *command], env=env, timeout=900, **QUIET)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    return done


@pytest.fixture(scope="session")
def references() -> dict:
    """Return the results of the calls on the plain-torch references, with real tensors of a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch_npu", torch_npu)  # as the rows of platform cpu do
        return {name: outcome(case, torch_npu, "cpu") for name, case in CASES.items()}


@pytest.fixture(scope="session")
def npu_python() -> tuple[str, dict[str, str]]:
    """Return the Python that has the real torch_npu, and its variables; make its environment if it is missing."""
    done = subprocess.run(["bash", ROOT / "scripts" / "npu_venv.sh", "--venv", sys.prefix], timeout=900, **QUIET)
    if done.returncode:
        pytest.fail(f"scripts/npu_venv.sh ended with {done.returncode}:\n{done.stderr[-4000:]}")
    *settings, python = done.stdout.split()
    return python, dict(setting.split("=", 1) for setting in settings)


@pytest.fixture(scope="session")
def npu(npu_python, tmp_path_factory) -> dict:
    """Return the results of the calls on the real torch_npu."""
    python, settings = npu_python
    env = {name: value for name, value in os.environ.items() if name not in ("VERL_PATCHES", "LD_LIBRARY_PATH")}
    out = tmp_path_factory.mktemp("npu") / "npu.json"
    run_program(python, HERE / "job.py", out, env=env | {"PYTHONPATH": str(ROOT)} | settings)
    return json.loads(out.read_text())
