"""The worker set-up hook: the prelude first, then the user's own."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from verl_patches.platform.npu.network import towards
from verl_patches.training.ray_start import HOOK, runtime_env

ROOT = Path(__file__).resolve().parents[2]


def test_user_variables_and_other_keys_stay():
    env = runtime_env({"A": "1"}, {"env_vars": {"A": "0", "B": "2"}, "pip": []})
    assert env["env_vars"] == {"A": "1", "B": "2"} and env["pip"] == [] and callable(env[HOOK]) and env[HOOK].__name__


FAKE_START = """
import sys, types
start = types.ModuleType("verl_patches.training.engine_start")
start.prepare = lambda engine: print("prepared", engine["layers"], "verl_patches.prelude_patch" in sys.modules)
sys.modules[start.__name__] = start
from verl_patches.training.ray_start import *
runtime_env({}, {HOOK: lambda: print("user")}, ENGINE)[HOOK]()
"""


WORKER = {"RANK": "0", "WG_PREFIX": "abc"}


@pytest.mark.parametrize(("env", "engine", "said"), [
    (WORKER, '{"layers": 4}', "prepared 4 True\nuser\n"),  # a training worker
    ({}, '{"layers": 4}', "user\n"),  # the controller
    ({"RANK": "0"}, '{"layers": 4}', "user\n"),  # the controller under a scheduler that gives ranks
    (WORKER, "None", "user\n")])  # a line without such an engine
def test_a_training_worker_prepares_its_engine_after_the_prelude_and_before_the_user(run_python, env, engine, said):
    done = run_python(f"ENGINE = {engine}\n{FAKE_START}", patches="line=pypi,platform=cpu", env=env).check()
    assert done.out == said


@pytest.mark.parametrize("given", ["'my_hooks.mine'", "__import__('my_hooks').mine", "None"])
def test_hook_runs_prelude_then_the_users(given, tmp_path):
    (tmp_path / "my_hooks.py").write_text(
        "import sys\ndef mine(): print('user', 'verl_patches.prelude_patch' in sys.modules)\n")
    code = (f"from verl_patches.training.ray_start import *\nenv = runtime_env({{}}, {{HOOK: {given}}})\n"
            "env[HOOK](); env[HOOK]()\nfrom verl_patches.patching.engine import current\n"
            "print(len(current().wanted) > 0)")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={
        "PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin", "VERL_PATCHES": "line=pypi,platform=cpu"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("" if given == "None" else "user True\n" * 2) + "True\n"


SEEN = """
import json, os, ray
from verl_patches.training.ray_start import start
start({"VERL_PATCHES": "line=pypi,platform=cpu"}, network={"nodes": NODES, "interface": None}, num_cpus=1,
      include_dashboard=False, _temp_dir=os.environ["RAY_TMPDIR"], object_store_memory=80 << 20)
names = ("HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
seen = ray.remote(lambda: {**{name: os.environ.get(name) for name in names},
                           "head": ray.get_runtime_context().gcs_address})
print(json.dumps(ray.get(seen.remote())))
"""


@pytest.mark.slow
def test_a_worker_finds_the_interface_by_the_head_of_its_own_ray(run_python, ray_folder):
    done = run_python(SEEN.replace("NODES", "1"), env={"RAY_TMPDIR": ray_folder, "GLOO_SOCKET_IFNAME": "of_the_node"})
    found = json.loads(done.check().out.splitlines()[-1])
    interface = towards(found["head"])
    assert (found["HCCL_SOCKET_IFNAME"], found["TP_SOCKET_IFNAME"]) == (f"={interface}", interface)
    assert found["GLOO_SOCKET_IFNAME"] == "of_the_node"
