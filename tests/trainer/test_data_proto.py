"""Run verl's own tests of DataProto with the installed tensordict and torch, for which neither line's verl was made.

verl asks for tensordict <= 0.6.2, and the pins have a later one (configs/upstream.yaml says why). The test file is that
of line a3's sources, verl that of either line: union, concat, chunk, pop, reorder, repeat, padding, indices, pickling.
"""

import os
import subprocess
import sys
import sysconfig

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.upstream]


@pytest.mark.parametrize("line", ["a3", "pypi"])
def test_verls_own_tests_pass(line, request, tmp_path):
    upstream = request.config.getoption("--upstream")
    verl = upstream / "verl" if line == "a3" else sysconfig.get_path("purelib")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    env = {**os.environ, "PYTHONPATH": str(verl), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    test = upstream / "verl" / "tests" / "test_protocol.py"
    done = subprocess.run([*command, test], cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.stdout.splitlines()[-1].startswith("13 passed"), done.stdout + done.stderr
