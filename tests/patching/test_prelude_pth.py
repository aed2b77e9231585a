"""The `.pth` file of install-prelude: the prelude before upstream in every process of one Python, nothing in others.

All processes here are of an environment of its own; upstream is a few files that say whether the prelude came first.
"""

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.patching import install_prelude
from verl_patches.patching.install_prelude import INSIDE, LINE

ROOT = Path(__file__).resolve().parents[2]
SAY = "import sys; print(__name__, 'verl_patches.prelude_patch' in sys.modules)\n"
WORKERS = "import torch\nclass ActorRolloutRefWorker: pass\n"
CPU = "line=pypi,platform=cpu"


class Python:
    """A Python with the packages of this one, a site-packages of its own, and a little upstream before all others."""

    def __init__(self, folder):
        self.upstream = folder / "upstream"
        for module in ("verl/__init__", "verl/deep/__init__", "verl/deep/low", "megatron/core/__init__", "vllm"):
            file = self.upstream / f"{module}.py"  # megatron: a namespace package, as the real one
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(SAY)
        self.workers = self.upstream / "verl" / INSIDE
        self.workers.parent.mkdir()
        self.workers.write_text(WORKERS)
        subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", folder / "venv"], check=True)
        self.executable = folder / "venv" / "bin" / "python"
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
        (self.site / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
        self.pth = self.site / install_prelude.NAME

    def run(self, *code, patches=None, before=""):
        """The finished process of `-c code`, or of `code` as arguments; `before`: a folder that goes first."""
        path = os.pathsep.join(filter(None, [str(before), str(self.upstream)]))
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": path, **({"VERL_PATCHES": patches} if patches else {})}
        arguments = code if len(code) > 1 else ("-c", *code)
        return subprocess.run([self.executable, *arguments], env=env, capture_output=True, text=True, timeout=60)

    def prelude(self, *options):
        """What `install-prelude --json` says."""
        done = self.run("-m", "verl_patches", "install-prelude", "--verl-path", str(self.upstream), "--json", *options)
        assert done.returncode == 0, done.stderr
        return {name: (Path(said["file"]), said["state"]) for name, said in json.loads(done.stdout).items()}


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return Python(tmp_path_factory.mktemp("python"))


@pytest.fixture
def python(bare):
    bare.prelude()
    yield bare
    bare.pth.unlink(missing_ok=True)


@pytest.mark.slow
def test_both_go_in_and_come_out_again(bare):
    def both(state):
        return {"line": (bare.workers, state), "pth": (bare.pth, state)}

    assert bare.prelude() == both("installed") and bare.prelude() == both("already installed")
    assert LINE in bare.workers.read_text() and bare.pth.read_text().count("\n") == 1
    assert bare.pth.stat().st_mode & 0o777 == 0o644
    bare.pth.write_text("import verl_patches.of_an_older_version\n")
    assert bare.prelude()["pth"][1] == "installed" and bare.pth.read_text() == install_prelude.TEXT
    assert bare.prelude("--undo") == both("removed") and bare.prelude("--undo") == both("not installed")
    assert bare.workers.read_text() == WORKERS
    assert [file.name for file in bare.site.iterdir() if file.is_file()] == ["base.pth"]


@pytest.mark.slow
def test_other_processes_import_nothing_of_ours(python):
    """The cost of the file: one line of Python at each start, and a look at each imported name."""
    code = "import sys, importlib.util, json; {}; print(*(m for m in sys.modules if m.startswith('verl_patches')))"
    assert python.run(code.format("pass")).stdout.split() == []
    found = python.run(code.format("assert importlib.util.find_spec('verl').origin"), patches=CPU).stdout.split()
    assert "verl_patches.patching.before_import" in found and "verl_patches.prelude_patch" not in found
    plain = python.run(code.format("import vllm")).stdout.split()  # a process of another user of this Python
    assert plain[:2] == ["vllm", "False"] and "verl_patches.prelude_patch" not in plain


@pytest.mark.slow
@pytest.mark.parametrize("module", ["verl", "verl.deep.low", "megatron.core", "vllm"])
def test_the_prelude_comes_before_upstream_once(python, module):
    code = f"import {module} as m; import importlib, verl.deep.low; print(vars(m.__spec__.loader).get('exec_module'))"
    said = python.run(code, patches=CPU)
    assert said.returncode == 0 and said.stdout.split()[1::2][:2] == ["True", "True"], said
    assert said.stdout.splitlines()[-1] == "None" and "False" not in said.stdout
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
    said = python.run(code, patches=CPU, before=tmp_path)
    assert said.stdout.splitlines() == ["ConfigError True"] * 2, said
    production = python.run("import verl")  # nothing said is line a3 on npu, as with the line alone
    assert production.returncode == 1 and "torch_npu is not installed" in production.stderr


def test_where_the_file_cannot_be_written_the_line_is_not_left_either(tmp_path, monkeypatch):
    file = tmp_path / "verl" / INSIDE
    file.parent.mkdir(parents=True)
    file.write_text(WORKERS)
    monkeypatch.setattr(install_prelude, "_pth_file", lambda: tmp_path / "no folder" / install_prelude.NAME)
    with pytest.raises(ConfigError, match="no folder"):
        install_prelude.install_prelude(tmp_path)
    assert file.read_text() == WORKERS
    assert install_prelude.insert_line(tmp_path).state == "installed"
    with pytest.raises(ConfigError, match="no folder"):
        install_prelude.install_prelude(tmp_path)
    assert LINE in file.read_text()  # it was there before


def test_without_site_packages_on_the_path_it_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT)])
    with pytest.raises(ConfigError, match="-S"):
        install_prelude.write_pth()


WITHOUT_US = """
import sys
exec(sys.argv[1])
import importlib.util, json
try: import vllm
except ImportError: print("swallowed")  # as upstream does
except RuntimeError as error: print(error)
"""


def test_a_file_left_behind_without_verl_patches_says_what_to_do(tmp_path):
    done = subprocess.run([sys.executable, "-I", "-S", "-c", WITHOUT_US, install_prelude.TEXT], capture_output=True,
                          text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in (install_prelude.NAME, "PYTHONPATH", "--undo", "No module named"))
