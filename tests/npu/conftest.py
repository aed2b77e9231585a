"""What job.py finds in the two Pythons, each asked once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
QUIET = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}


def run_program(python: str, *command: str | Path, env: dict[str, str]) -> subprocess.CompletedProcess:
    """A program of this folder that has ended well; the test fails with the end of its words if it did not."""
    done = subprocess.run([python, *command], env=env, timeout=900, **QUIET)
    if done.returncode:
        pytest.fail(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stderr[-6000:]}")
    return done


def run_job(python: str, mode: str, out: Path, **env: str) -> dict:
    """The JSON of `job.py MODE`."""
    full_env = {k: v for k, v in os.environ.items() if k not in ("VERL_PATCHES", "LD_LIBRARY_PATH")}
    run_program(python, HERE / "job.py", mode, out, env=full_env | {"PYTHONPATH": str(ROOT), **env})
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
def references(tmp_path_factory) -> dict:
    """The calls on the plain-torch references."""
    return run_job(sys.executable, "references", tmp_path_factory.mktemp("npu") / "references.json")


@pytest.fixture(scope="session")
def npu_python() -> tuple[str, dict[str, str]]:
    """The Python that has the real torch_npu, and its variables; its environment is made if it is not there."""
    done = subprocess.run(["bash", ROOT / "scripts" / "npu_venv.sh", "--venv", sys.prefix], timeout=900, **QUIET)
    if done.returncode:
        pytest.fail(f"scripts/npu_venv.sh ended with {done.returncode}:\n{done.stderr[-4000:]}")
    *settings, python = done.stdout.split()
    return python, dict(setting.split("=", 1) for setting in settings)


@pytest.fixture(scope="session")
def npu(npu_python, tmp_path_factory) -> dict:
    """The calls on the real torch_npu."""
    python, env = npu_python
    return run_job(python, "npu", tmp_path_factory.mktemp("npu") / "npu.json", **env)
