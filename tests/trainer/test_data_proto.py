"""verl's own tests of DataProto with the installed tensordict and torch, which neither line's verl was made for.

verl asks for tensordict <= 0.6.2, and the pins have a later one (configs/upstream.yaml says why). The test file is that
of line a3's sources, verl that of either line: union, concat, chunk, pop, reorder, repeat, padding, indices, pickling.
"""

import os
import re
import subprocess
import sys
import sysconfig

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.upstream]
LOCKED = """
from tensordict import TensorDict
def pop(self, *args, **kwargs):
    raise RuntimeError("Cannot modify locked TensorDict")
TensorDict.pop = pop
"""  # what tensordict 0.10.0 does


def outcomes(upstream, verl, folder, *options):
    """{outcome: number} of verl's tests/test_protocol.py over the verl in folder `verl`."""
    test = upstream / "verl" / "tests" / "test_protocol.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    env = {**os.environ, "PYTHONPATH": f"{verl}:{folder}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([*command, *options, test], cwd=folder, capture_output=True, text=True, env=env)
    found = re.findall(r"(\d+) (passed|failed|errors?|skipped)", done.stdout.splitlines()[-1])
    assert found, done.stdout + done.stderr
    return {outcome: int(number) for number, outcome in found}


@pytest.mark.parametrize("line", ["a3", "pypi"])
def test_verls_own_tests_pass(line, request, tmp_path):
    upstream = request.config.getoption("--upstream")
    verl = upstream / "verl" if line == "a3" else sysconfig.get_path("purelib")
    assert outcomes(upstream, verl, tmp_path) == {"passed": 13}


def test_a_tensordict_that_does_not_fit_is_seen(request, tmp_path):
    (tmp_path / "locked.py").write_text(LOCKED)
    upstream = request.config.getoption("--upstream")
    assert outcomes(upstream, upstream / "verl", tmp_path, "-p", "locked") == {"failed": 1, "passed": 12}
