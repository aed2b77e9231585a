"""Test that a Ray worker's real torch_npu calls the device runtime only on the die that Ray gave the worker.

The runtime itself is a stand-in that logs every call (answers.c); calls that CANN's own libraries make when they are
loaded are not covered.
"""

import json
import subprocess

import pytest

from tests.npu.conftest import QUIET, ROOT

pytestmark = pytest.mark.slow
VERLS = {"RANK": "0", "WG_PREFIX": "abc"}

WORKER = """
from verl_patches.trainer.worker_settings import chain_setup_hooks
chain_setup_hooks(None)()
done("set-up hook")
if ORDER == "as Ray":
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "5"
import verl
done("import verl")
os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "5"
import torch
found["devices"] = torch.npu.device_count()
"""


@pytest.fixture
def run(npu_python, tmp_path):
    """Return run(code, **variables) -> (exit code, {"calls": {step: [[function, visible devices]]}, ...}, stderr)."""
    python, settings = npu_python
    start = f"""
import json, os
found, calls = {{"calls": {{}}}}, {str(tmp_path / "calls")!r}
def done(step):
    lines = open(calls).read().splitlines() if os.path.exists(calls) else []
    found["calls"][step] = [line.split(" ") for line in lines]
    open(calls, "w").close()
"""

    def run(code, **variables):
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "VERL_PATCHES": "line=a3,platform=npu"}
        env |= {"CANN_DIES": "16", "CANN_CALLS": str(tmp_path / "calls"), **settings, **variables}
        command = [python, "-W", "ignore", "-c", f"{start}{code}\nprint(json.dumps(found))"]
        ended = subprocess.run(command, env=env, timeout=900, **QUIET)
        return ended.returncode, json.loads(ended.stdout.splitlines()[-1]) if not ended.returncode else {}, ended.stderr

    return run


@pytest.mark.parametrize(("order", "asked_on", "devices"), [("as Ray", "5", 1), ("too late", "unset", 16)])
def test_a_worker_asks_with_the_import_of_verl_and_not_before(run, order, asked_on, devices):
    code, found, error = run(f"ORDER = {order!r}\n{WORKER}", **VERLS)
    assert code == 0, error
    assert found["calls"]["set-up hook"] == []
    assert found["calls"]["import verl"][0] == ["aclrtGetDeviceCount", asked_on]
    assert found["devices"] == devices  # 16 is what check_visible_die refuses
