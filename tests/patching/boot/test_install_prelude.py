"""Test install-prelude: the line in verl's worker module and the `.pth` file are written, refused, removed, and work.

The `.pth` tests run a Python with its own site-packages; its upstream is a few files that print whether the prelude ran
first. The last test inserts the line alone into a copy of the installed verl.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import python_with_prelude
from verl_patches.errors import ConfigError
from verl_patches.patching.boot import install_prelude
from verl_patches.patching.boot.install_prelude import PRELUDE_LINE, WORKER_FILE, insert_line, remove_line

# shaped like upstream's file, without its text
WORKER = (
    '# Copyright\n"""\nA docstring\n"""\n\nimport logging\n\nimport torch\n\n\nclass ActorRolloutRefWorker:\n    pass\n'
)


def make_tree(root: Path, text: str = WORKER) -> Path:
    """Make a checkout with a verl package and return its worker file."""
    file = root / "verl" / WORKER_FILE
    file.parent.mkdir(parents=True)
    (root / "verl" / "__init__.py").write_text("raise RuntimeError('install-prelude must not import verl')\n")
    file.write_text(text)
    return file


@pytest.mark.parametrize("inner", ["", "verl"])
def test_the_line_is_inserted_once_before_the_first_import_and_removed_byte_for_byte(tmp_path, inner):
    file = make_tree(tmp_path)
    result = insert_line(tmp_path / inner)
    assert (result.file, result.line, result.state) == (file, 6, "installed")
    assert file.read_text() == WORKER.replace("import logging\n", f"{PRELUDE_LINE}\nimport logging\n", 1)
    again = insert_line(tmp_path / inner)
    assert (again.line, again.state) == (6, "already installed")
    assert file.read_text().count(PRELUDE_LINE) == 1
    assert remove_line(tmp_path / inner).state == "removed"
    assert file.read_text() == WORKER
    assert remove_line(tmp_path / inner).state == "not installed"
    assert os.listdir(file.parent) == [file.name]  # no temporary file is left


def test_verl_is_found_without_importing_it_and_one_that_is_not_there_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="--verl-path DIR"):
        insert_line(tmp_path)
    file = make_tree(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "verl", raising=False)
    assert insert_line().file == file and "verl" not in sys.modules
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="no verl is installed"):
        insert_line()


# -- the .pth file -----------------------------------------------------------------------------------------------------

PRINT_STATE = "import sys; print(__name__, 'verl_patches.prelude_patch' in sys.modules)\n"
CPU = "line=pypi,platform=cpu"


class Python:
    """Make a Python with this one's packages, a site-packages of its own, and a small upstream before all others."""

    def __init__(self, folder):
        self.upstream = folder / "upstream"
        for module in ("verl/__init__", "verl/deep/__init__", "verl/deep/low", "megatron/core/__init__", "vllm"):
            file = self.upstream / f"{module}.py"  # megatron: a namespace package, as the real one
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(PRINT_STATE)
        self.workers = self.upstream / "verl" / WORKER_FILE
        self.workers.parent.mkdir()
        self.workers.write_text(WORKER)
        self.executable = python_with_prelude(folder)
        (self.pth,) = folder.rglob(install_prelude.PTH_NAME)

    def run(self, *code, patches=None, before=""):
        """Run `-c code`, or `code` as arguments, and return the finished process; `before`: a folder to put first."""
        path = os.pathsep.join(filter(None, [str(before), str(self.upstream)]))
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, **({"VERL_PATCHES": patches} if patches else {})}
        arguments = code if len(code) > 1 else ("-c", *code)
        return subprocess.run([self.executable, *arguments], env=env, capture_output=True, text=True)

    def prelude(self, *options):
        """Return the results of `install-prelude --json`."""
        done = self.run("-m", "verl_patches", "install-prelude", "--verl-path", str(self.upstream), "--json", *options)
        assert done.returncode == 0, done.stderr
        return {name: (Path(result["file"]), result["state"]) for name, result in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return Python(tmp_path_factory.mktemp("python"))


@pytest.fixture
def python(bare):
    bare.prelude()
    return bare


@pytest.mark.slow
def test_both_go_in_and_come_out_again(bare):
    def both(state):
        return {"line": (bare.workers, state), "pth": (bare.pth, state)}

    bare.prelude("--undo")
    assert bare.prelude() == both("installed") and bare.prelude() == both("already installed")
    assert PRELUDE_LINE in bare.workers.read_text() and bare.pth.read_text().count("\n") == 1
    bare.pth.write_text("import verl_patches.of_an_older_version\n")
    assert bare.prelude()["pth"][1] == "installed" and bare.pth.read_text() == install_prelude.PTH_TEXT
    assert bare.prelude("--undo") == both("removed") and bare.prelude("--undo") == both("not installed")
    assert bare.workers.read_text() == WORKER
    assert [file.name for file in bare.pth.parent.iterdir() if file.is_file()] == ["base.pth"]


@pytest.mark.slow
def test_other_processes_import_nothing_of_ours(python):
    """Check the cost of the file: one line of Python at each start, and a look at each imported name."""
    code = "import sys, importlib.util, json; {}; print(*(m for m in sys.modules if m.startswith('verl_patches')))"
    assert python.run(code.format("pass")).stdout.split() == []
    found = python.run(code.format("assert importlib.util.find_spec('verl').origin"), patches=CPU).stdout.split()
    assert "verl_patches.patching.boot.before_import" in found and "verl_patches.prelude_patch" not in found
    plain = python.run(code.format("import vllm")).stdout.split()  # a process of another user of this Python
    assert plain[:2] == ["vllm", "False"] and "verl_patches.prelude_patch" not in plain


@pytest.mark.slow
@pytest.mark.parametrize("module", ["verl", "verl.deep.low", "megatron.core", "vllm"])
def test_the_prelude_runs_once_before_upstream(python, module):
    code = f"import {module} as m; import importlib, verl.deep.low; print(vars(m.__spec__.loader).get('exec_module'))"
    done = python.run(code, patches=CPU)
    assert done.returncode == 0 and done.stdout.split()[1::2][:2] == ["True", "True"], done
    assert done.stdout.splitlines()[-1] == "None" and "False" not in done.stdout
    without = python.run("-S", "-c", f"import {module}", patches=CPU)  # -S: no .pth file is read
    assert "False" in without.stdout


@pytest.mark.slow
def test_a_prelude_that_fails_stops_every_import_of_upstream(python, tmp_path):
    (tmp_path / "wrapt.py").write_text("raise ImportError('no wrapt here')\n")
    code = """
for _ in range(2):
    try: import vllm
    except ImportError: print("swallowed")  # as upstream does
    except ValueError as error: print(type(error).__name__, "no wrapt here" in str(error))
"""
    done = python.run(code, patches=CPU, before=tmp_path)
    assert done.stdout.splitlines() == ["ConfigError True"] * 2, done
    production = python.run("import verl")  # the default is line a3 on npu, as with the line alone
    assert production.returncode == 1 and "torch_npu is not installed" in production.stderr


WITHOUT_US = """
import sys
exec(sys.argv[1])
import importlib.util, json
try: import vllm
except ImportError: print("swallowed")  # as upstream does
except RuntimeError as error: print(error)
"""


def test_a_pth_file_without_verl_patches_raises_an_error_with_the_remedy(tmp_path):
    command = [sys.executable, "-I", "-S", "-c", WITHOUT_US, install_prelude.PTH_TEXT]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in (install_prelude.PTH_NAME, "PYTHONPATH", "--undo", "No module named"))


# -- the line alone ----------------------------------------------------------------------------------------------------

HALF_BUILT = """
import verl.workers.megatron_workers as workers
assert workers.__file__.startswith({tree!r}), workers.__file__
from verl_patches.patching.engine import current_engine
patches = current_engine()
states = {{row["id"]: row["state"] for row in patches.status()}}
assert states["update.recipe_worker"] == "active", states
assert workers.ActorRolloutRefWorker.prove_patches.__module__ == "verl_patches.worker.recipe_worker"
modules = __import__("sys").modules
waiting = [n for n in patches.wanted if states[n] != "active" and patches.specs[n].target_module in modules]
assert not waiting, waiting
"""


@pytest.mark.slow
def test_the_line_alone_makes_rows_of_its_own_module_active(tmp_path, run_python):
    source = Path(importlib.util.find_spec("verl").submodule_search_locations[0])
    shutil.copytree(source, tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    env = {"PYTHONPATH": str(tmp_path), "VLLM_USE_V1": "0", "TORCHDYNAMO_DISABLE": "1"}

    def python(code):
        return run_python(code, patches=CPU, env=env)

    assert install_prelude.insert_line(tmp_path).state == "installed"  # and no .pth file
    python(HALF_BUILT.format(tree=str(tmp_path))).check()
    before_the_line = "from verl.utils.vllm_utils import is_version_ge; import verl.workers.megatron_workers"
    alone = python(before_the_line)  # verl's TaskRunner: on a CPU vLLM cannot be imported unpatched
    assert alone.rc != 0 and "megatron_workers" not in alone.err, alone.err[-2000:]
    python(install_prelude.PTH_TEXT + before_the_line).check()
    assert install_prelude.remove_line(tmp_path).state == "removed"
    assert python(HALF_BUILT.format(tree=str(tmp_path))).rc != 0
