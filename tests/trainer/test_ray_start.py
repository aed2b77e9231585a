"""Test the worker set-up hook: the prelude first, then the user's own."""

import pytest

from verl_patches.platform.npu import interface_towards
from verl_patches.trainer.ray_start import HOOK, runtime_env


def test_user_variables_and_other_keys_stay():
    env = runtime_env({"A": "1"}, {"env_vars": {"A": "0", "B": "2"}, "pip": []})
    assert env["env_vars"] == {"A": "1", "B": "2"} and env["pip"] == [] and callable(env[HOOK]) and env[HOOK].__name__


CPU, WORKER = "line=pypi,platform=cpu", {"RANK": "0", "WG_PREFIX": "abc"}


@pytest.fixture(scope="module")
def ray_job(ray_folder, run_ranks, tmp_path_factory):
    """Return the answers of tests/trainer/die_worker.py, with real Ray and its resource NPU."""
    path = tmp_path_factory.mktemp("path")
    (path / "verl.py").touch()
    env = {"PYTHONPATH": str(path), "VERL_PATCHES": CPU, "RAY_TMPDIR": ray_folder, "GLOO_SOCKET_IFNAME": "of_the_node"}
    return run_ranks("tests.trainer.die_worker:answers", env=env, fresh=True, backend=None)[0]


@pytest.mark.slow
def test_each_worker_is_on_the_die_that_ray_gave_it_before_it_imports_verl(ray_job):
    first, second = ray_job["dies"]["first"], ray_job["dies"]["second"]
    assert first["at hook"] == second["at hook"] == "None"  # too early: Ray has not set it yet
    assert {first["at import"], second["at import"]} == {"0", "1"} and first["refused"] is second["refused"] is None
    assert [die["prepared"] for die in (first, second)] == [f"4 {die['now']}" for die in (first, second)]


@pytest.mark.slow
def test_a_worker_finds_the_interface_by_the_head_of_its_own_ray(ray_job):
    found = ray_job["dies"]["first"]
    interface = interface_towards(found["head"])
    assert (found["HCCL_SOCKET_IFNAME"], found["TP_SOCKET_IFNAME"]) == (f"={interface}", interface)
    assert found["GLOO_SOCKET_IFNAME"] == "of_the_node"


@pytest.mark.slow
@pytest.mark.parametrize(("case", "words"), [
    ("runtime came first", "sees 16 devices, expected 1"),
    ("not set", "ASCEND_RT_VISIBLE_DEVICES is None, expected "),
])  # fmt: skip
def test_a_worker_on_another_die_is_refused(ray_job, case, words):
    refused = ray_job["dies"][case]["refused"]
    assert refused.startswith("rank 0 (pid ") and words in refused, refused


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["hook", "class", "init"])  # the last in a wait of verl's own
def test_a_worker_that_cannot_start_ends_the_wait_with_its_own_error(ray_job, kind):
    error = ray_job["failed"][kind]
    assert error.startswith("Asked (pid ") and error.endswith("ConfigError: row a.b: has drifted")
    assert "could not start" in error
    assert ray_job["ended"] == [
        None,
        None,
    ]  # a wait is not ended by actors that were killed on purpose, nor by the watch's


@pytest.mark.parametrize("given", ["'my_hooks.mine'", "__import__('my_hooks').mine", "None"])
def test_hook_runs_prelude_then_the_users(given, tmp_path, run_python):
    hook = "import sys\ndef mine(): print('user', 'verl_patches.prelude_patch' in sys.modules)\n"
    (tmp_path / "my_hooks.py").write_text(hook)
    code = f"from verl_patches.trainer.ray_start import *\nhook = runtime_env({{}}, {{HOOK: {given}}})[HOOK]\n"
    code += "hook(); hook()\nfrom verl_patches.patching.engine import current_engine\n"
    code += "print(len(current_engine().wanted) > 0)"
    done = run_python(code, patches=CPU, env={"PYTHONPATH": str(tmp_path)}).check()
    assert done.out == ("" if given == "None" else "user True\n" * 2) + "True\n"
