"""Test the settings that workers get without the launcher: the driver's VERL_PATCHES, with a real Ray too."""

import json
import socket
import subprocess

import pytest

from tests.conftest import python_with_prelude

SEND = """
import json, sys
from verl_patches import prelude_patch
from verl_patches.trainer.worker_settings import send_switches
given = eval(sys.argv[1])
print(json.dumps(send_switches(lambda *args, **options: options.get("runtime_env"))(**given)))
"""
SWITCHES = "line=pypi,platform=cpu,-memory.ledger"


VARIABLE, OTHER = {"VERL_PATCHES": SWITCHES}, {"env_vars": {"VERL_PATCHES": "x"}}


@pytest.mark.slow
@pytest.mark.parametrize(("given", "job", "runtime_env"), [
    ("{}", None, {"env_vars": VARIABLE}),
    ("{'runtime_env': {'env_vars': {'A': '1'}, 'pip': []}}", None, {"env_vars": {"A": "1", **VARIABLE}, "pip": []}),
    ("{}", json.dumps({"runtime_env": OTHER}), None),  # Ray merges the submitted job's
])  # fmt: skip
def test_workers_get_the_drivers_switches_unless_they_have_some(run_warm, given, job, runtime_env):
    done = run_warm(SEND, given, patches=SWITCHES, env={"RAY_JOB_CONFIG_JSON": job} if job else None).check()
    assert json.loads(done.out) == runtime_env


JOB = """
import os, sys
import ray

@ray.remote(num_cpus=0, max_retries=0)
def imports_verl():
    import verl
    return verl.said, os.environ["VERL_PATCHES"]

def job():
    ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False)
    try:
        return ray.get(imports_verl.remote())
    except ray.exceptions.RayTaskError as error:
        return str(error)
    finally:
        ray.shutdown()

print("missing", job().replace("\\n", " "))
os.environ["VERL_PATCHES"] = "line=pypi,platform=cpu"
import verl  # in the driver before ray.init, as verl.trainer.main_ppo does
del os.environ["VERL_PATCHES"]  # a Ray whose `ray start` did not have it
print("told", *job())
"""


@pytest.mark.slow
def test_a_worker_without_the_variable_is_refused_by_node_and_the_row_gives_it(tmp_path, ray_folder):
    """Test row dispatch.send_switches in a Python with the .pth file; `verl` reports whether the prelude came first."""
    (tmp_path / "verl.py").write_text("import sys\nsaid = 'verl_patches.prelude_patch' in sys.modules\n")
    python = python_with_prelude(tmp_path)
    env = {"PYTHONPATH": str(tmp_path), "PATH": f"{python.parent}:/usr/bin:/bin", "RAY_TMPDIR": ray_folder}
    env["RAY_USAGE_STATS_ENABLED"] = "0"
    done = subprocess.run([python, "-c", JOB], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    missing, told = done.stdout.splitlines()
    assert "ConfigError" in missing and "VERL_PATCHES is not set" in missing and socket.gethostname() in missing
    assert told == "told True line=pypi,platform=cpu"


SETTINGS = """
import json, os, sys, types
import ray

class Worker:
    def told(self):
        from verl_patches.trainer.worker_settings import prepare_as_sent
        found = []
        start = types.ModuleType("verl_patches.model.mindspeed.start")  # it needs MindSpeed
        start.prepare = found.append
        sys.modules[start.__name__] = start
        try:
            prepare_as_sent(None)
        except ValueError as error:
            return str(error)
        return [found, os.environ.get("GLOO_SOCKET_IFNAME")]

def told(**env):
    actor = ray.remote(num_cpus=0)(Worker).options(runtime_env={"env_vars": env}).remote()
    return ray.get(actor.told.remote())

ray.init(num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False,
         _node_ip_address="127.0.0.1")
from verl_patches.trainer.worker_settings import send_settings
verls = {"RANK": "0", "WG_PREFIX": "a"}
answers = [told(**verls)]
send_settings({"layers": 4}, {"nodes": 1, "interface": None})
answers += [told(), told(**verls)]
send_settings(None, {"nodes": 2, "interface": None})
answers += [told(**verls)]
ray.shutdown()
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_training_workers_get_engine_and_interface_from_the_controller(ray_folder, run_python):
    """Check nothing sent, another process, a training worker, and two nodes that would meet over the loopback."""
    done = run_python(SETTINGS, env={"RAY_TMPDIR": ray_folder}).check()
    unsent, other, worker, loopback = json.loads(done.out.splitlines()[-1])
    assert unsent == other == [[], None] and worker == [[{"layers": 4}], "lo"]
    assert "trainer.nnodes is 2" in loopback
