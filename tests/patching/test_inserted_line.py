"""The inserted line alone, in a copy of the installed verl: the prelude runs while that very module is half built."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_patches.patching import install_prelude

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import verl.workers.megatron_workers as workers
assert workers.__file__.startswith({tree!r}), workers.__file__
from verl_patches.patching.engine import current
states = {{row["id"]: row["state"] for row in current().status()}}
assert states["update.prove_patches"] == "active" and hasattr(workers.ActorRolloutRefWorker, "prove_patches"), states
modules = __import__("sys").modules
waiting = [n for n in current().wanted if states[n] != "active" and current().specs[n].target_module in modules]
assert not waiting, waiting
"""


@pytest.mark.slow
def test_the_line_alone_makes_rows_of_its_own_module_active(tmp_path):
    source = Path(find_spec("verl").submodule_search_locations[0])
    shutil.copytree(source, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}", "VERL_PATCHES": "line=pypi,platform=cpu",
           "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "VLLM_USE_V1": "0", "TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"}

    def python(*arguments):
        return subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=240)

    assert install_prelude.insert_line(tmp_path).state == "installed"  # and no .pth file
    done = python("-c", CODE.format(tree=str(tmp_path)))
    assert done.returncode == 0, done.stderr[-2000:]
    before_the_line = "from verl.utils.vllm_utils import is_version_ge; import verl.workers.megatron_workers"
    alone = python("-c", before_the_line)  # verl's TaskRunner: on a CPU vLLM cannot be imported unpatched
    assert alone.returncode != 0 and "megatron_workers" not in alone.stderr, alone.stderr[-2000:]
    assert python("-c", install_prelude.TEXT + before_the_line).returncode == 0
    assert install_prelude.remove_line(tmp_path).state == "removed"
    assert python("-c", CODE.format(tree=str(tmp_path))).returncode != 0
