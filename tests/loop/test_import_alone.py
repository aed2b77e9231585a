"""Test the import alone: verl's own entry point with verl's own configuration, on a Ray of its own.

`install-prelude` was run, and VERL_PATCHES is the driver's: no launcher, no `recipe:`, no set-up hook.
"""

import contextlib
import os
import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import yaml
from loop_runs import ROOT, STREAMS

from tests.conftest import python_with_prelude
from tests.ranks import reserved_port
from verl_patches.upstream.checkouts import find_trees

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
SHELL = {  # what the launcher sets for a CPU (run/environment.py)
    "VLLM_USE_V1": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "COLUMNS": "200",
}  # fmt: skip
RAY = (
    "-m ray.scripts.scripts start --head --block --port=0 --min-worker-port=0 --max-worker-port=0 "
    f"--include-dashboard=false --num-cpus=8 --num-gpus=2 --object-store-memory={256 << 20}"
).split()


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Make an environment over this one whose site-packages have the .pth file."""
    return python_with_prelude(tmp_path_factory.mktemp("alone"))


def run_verl(python, smoke_run, patches, path, ray_folder, cwd):
    """Run verl.trainer.main_ppo on a Ray without VERL_PATCHES; return exit code, output, output of Ray's processes.

    Ray forwards their output as long as the driver lives, which may miss the last lines.
    """
    Path(ray_folder).mkdir()
    env = {**os.environ, **SHELL, "RAY_TMPDIR": ray_folder, "PYTHONPATH": os.pathsep.join(path)}
    used = yaml.safe_load((smoke_run.folder / "config.yaml").read_text())
    given = {
        "actor_rollout_ref.model.path": used["actor_rollout_ref"]["model"]["path"],
        **{f"data.{name}": used["data"][name] for name in ("train_files", "val_files")},
        "custom_reward_function.path": ROOT / "verl_patches/rewards/by_source.py",
        "custom_reward_function.name": "compute_score",
    }
    overrides = [f"{key}={value}".replace("'", "").replace(" ", "") for key, value in given.items()]
    main = [python, "-m", "verl.trainer.main_ppo", "--config-dir", HERE, "--config-name", "plain_verl", *overrides]
    with ray_of_its_own(python, env, ray_folder, cwd):
        done = subprocess.run(main, env={**env, "VERL_PATCHES": patches}, cwd=cwd, **STREAMS)
        files = Path(ray_folder, "ray", "session_latest", "logs").glob("worker-*.out")
        written = "".join(file.read_text(errors="replace") for file in files)
    return done.returncode, done.stdout, written


@contextlib.contextmanager
def ray_of_its_own(python, env, ray_folder, cwd):
    """Start a Ray whose client server has a port of its own, as the default one may be another run's."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with reserved_port() as port:
        ray = subprocess.Popen([python, *RAY, f"--ray-client-server-port={port}"], env=env, cwd=cwd, **quiet)
        try:
            while not Path(ray_folder, "ray", "ray_current_cluster").is_file():
                assert ray.poll() is None, "Ray did not start"
                time.sleep(0.2)
            yield
        finally:
            started = psutil.Process(ray.pid).children(recursive=True)
            ray.terminate()
            _, alive = psutil.wait_procs([*started, ray], timeout=10)
            for process in alive:
                process.kill()
            ray.wait()


def check(code, output, written, smoke_run):
    """Check three steps with the smoke's figures, proofs before them, and one report of the missing launcher."""
    assert code == 0, output[-4000:]
    for metric, key, tolerance in (("actor/grad_norm", "grad_norm", 2e-3), ("critic/score/mean", "reward", 1e-3)):
        values = [float(value) for value in re.findall(rf"{metric}:([\d.]+)", written)]
        assert values == pytest.approx([step[key] for step in smoke_run.steps], abs=tolerance)
    assert output.count("started without its launcher") == 1
    assert "patches proven in controller and 2 workers" in output


@pytest.mark.nightly
def test_three_steps_on_line_pypi(smoke, python, ray_folder, tmp_path):
    check(*run_verl(python, smoke(), "line=pypi,platform=cpu", [str(ROOT)], f"{ray_folder}/p", tmp_path), smoke())
    assert not list(tmp_path.rglob("summary.json"))  # nothing was asked to be recorded


@pytest.mark.upstream
def test_three_steps_on_line_a3(a3, python, ray_folder, tmp_path, pytestconfig):
    """Check that row update.recipe_by_default also sets the configuration from which workers prepare MindSpeed."""
    trees = [str(folder) for folder in find_trees(pytestconfig.getoption("--upstream")).folders]
    path = [str(ROOT), *trees]
    check(*run_verl(python, a3(), "line=a3,platform=cpu", path, f"{ray_folder}/a", tmp_path), a3())
