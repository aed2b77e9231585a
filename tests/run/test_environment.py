import functools
import re
import subprocess

import pytest

from tests.symbols import symbol_source
from verl_patches.catalog import platform_rows
from verl_patches.patching.contract import installed_root
from verl_patches.platform.npu import machine
from verl_patches.run.compose import compose
from verl_patches.run.environment import environment_variables, process_environment, worker_environment
from verl_patches.upstream.pins import load_pins

TINY, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_256die_random_init"
WEIGHTS = "deepseekv3_256die_true_weight"
READ_NOWHERE = ("VLLM_ENABLE_MC2", "VLLM_ASCEND_ACL_OP_INIT_MODE")  # public scripts set them, and no source reads them


@functools.cache
def composed_run(name, *overrides):
    return compose(name, overrides, platform_rows)


def variables(name, *overrides):
    return {v.name: v for v in environment_variables(composed_run(name, *overrides), temp_dir="/tmp/vp-x")}


@pytest.mark.parametrize(
    ("name", "line"), [(TINY, "pypi"), (TINY, "a3"), (LARGE, "a3"), (WEIGHTS, "a3"), (WEIGHTS, "pypi")]
)
def test_every_variable_is_one_of_the_pin_file(name, line):
    pins = load_pins()
    found = variables(name, f"recipe.line={line}")
    unread = {name for name in found if not pins.readers(name, line)}
    assert not unread if (name, line) != (WEIGHTS, "pypi") else "VLLM_ENABLE_FIX_ROUTE" in unread
    for variable in found.values():
        assert variable.reason and variable.read_by == pins.read_by(variable.name, line) and variable.read_by
    assert not {*READ_NOWHERE, "ACL_OP_INIT_MODE"} & set(found) and len(found) > 12


def misplaced(line, roots, read=symbol_source):
    """Return how many symbols of one line's pins were read below `roots`, and those that do not name the variable.

    roots: {top-level package: the folder that holds it}.
    """
    compared, wrong = 0, []
    pins = load_pins()
    for name in pins.environment:
        for symbol in pins.readers(name, line):
            root = roots.get(symbol.partition(".")[0])
            if root is None:  # a library without a symbol, or a package that is not there
                continue
            compared += 1
            if not re.search(rf"\b{name}\b", read(symbol, root)):
                wrong.append((name, symbol))
    return compared, wrong


def test_the_installed_line_reads_each_variable_where_the_pin_file_says():
    roots = {name: installed_root(name) for name in "verl megatron vllm ray torch huggingface_hub".split()}
    assert misplaced("pypi", roots) == (21, [])
    # controls: a module that names TENSORBOARD_DIR alone, and symbols that are not there
    other = symbol_source("verl.utils.tracking", roots["verl"])
    assert len(misplaced("pypi", roots, lambda symbol, root: other)[1]) == 18
    assert len(misplaced("pypi", roots, lambda symbol, root: symbol_source(f"{symbol}.absent", root))[1]) == 21


@pytest.mark.upstream
def test_the_ascend_line_reads_each_variable_where_the_pin_file_says(pytestconfig):
    folder, pins = pytestconfig.getoption("--upstream"), load_pins()
    repositories = pins.line("a3").repositories
    roots = {package: folder / name for name, pin in repositories.items() for package in pin.packages}
    compared, wrong = misplaced("a3", {p: root.absolute() for p, root in roots.items() if (root / p).is_dir()})
    assert compared > 12 and wrong == []
    clones = [folder / name for name in pins.line("a3").repositories if (folder / name / ".git").exists()]
    names = [*READ_NOWHERE, "VLLM_ENABLE_FIX_ROUTE"]
    searches = {name: [subprocess.run(["git", "grep", "-q", name], cwd=c).returncode for c in clones] for name in names}
    found = [name for name, codes in searches.items() if 0 in codes]
    assert found == ["VLLM_ENABLE_FIX_ROUTE"] and len(clones) > 3  # no source names the other variables


def test_switches_and_routing_follow_the_recipe():
    patched = variables(TINY, "recipe.patches=[+model.config,-reshard.*]")["VERL_PATCHES"].value
    own, rows = patched.split(",rows=")
    assert own == "line=pypi,platform=cpu,+model.config,-reshard.*"
    assert "model.config" in rows.split(":") and not re.search(r"reshard\.", rows)
    for shell in ({}, {"VLLM_ENABLE_FIX_ROUTE": "", "VLLM_ASCEND_MLA_PA": "1"}):  # the shell does not decide
        found = process_environment(environment_variables(composed_run(WEIGHTS), "/x"), shell)
        assert (found["VLLM_ENABLE_FIX_ROUTE"], found["VLLM_ASCEND_MLA_PA"]) == ("0", "0")
    assert variables(WEIGHTS, "recipe.rollout.ascend.mla_pa=true")["VLLM_ASCEND_MLA_PA"].value == "1"
    assert {"VLLM_ENABLE_FIX_ROUTE", "VLLM_ASCEND_MLA_PA"} <= set(worker_environment(composed_run(WEIGHTS)))
    assert "VLLM_ENABLE_FIX_ROUTE" not in variables(TINY) and variables(TINY)["VLLM_USE_V1"].value == "0"


def test_variables_of_workers_and_of_the_driver():
    run = composed_run(TINY)
    shipped = set(worker_environment(run))
    assert {"VERL_PATCHES", "VLLM_USE_V1", "OMP_NUM_THREADS"} <= shipped
    assert not {"PYTHONPATH", "TMPDIR", "RAY_TMPDIR", "RAY_ADDRESS"} & shipped
    shell = {"HOME": "/h", "RAY_ADDRESS": "x:1", "VERL_PATCHES": "old"}
    found = process_environment(environment_variables(run, "/x"), shell)
    assert found["HOME"] == "/h" and "RAY_ADDRESS" not in found
    assert found["VERL_PATCHES"] == run.process_switches.text() and found["RAY_TMPDIR"] == "/x/ray"
    joined = process_environment(environment_variables(composed_run(LARGE), "/x"), {})
    assert joined["RAY_ADDRESS"] == "auto" and "RAY_TMPDIR" not in joined


def test_caches_are_in_the_runs_temporary_folder_where_the_home_folder_is_not_writable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for home, caches in ((tmp_path / "new", None), (tmp_path / "file" / "home", "/x/cache")):
        monkeypatch.setenv("HOME", str(home))
        found = {v.name: v.value for v in environment_variables(composed_run(TINY), "/x")}
        assert found.get("XDG_CACHE_HOME") == caches and not home.exists()
    monkeypatch.setenv("XDG_CACHE_HOME", "/own")
    assert "XDG_CACHE_HOME" not in {v.name for v in environment_variables(composed_run(TINY), "/x")}


def test_a_run_on_npus_preloads_jemalloc_in_its_driver_and_ray_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(machine, "JEMALLOC", (str(tmp_path),))
    run = composed_run("deepseekv3_16die")
    assert "LD_PRELOAD" not in {v.name for v in environment_variables(run)}
    (tmp_path / "libjemalloc.so.2").touch()
    (found,) = (v for v in environment_variables(run) if v.name == "LD_PRELOAD")
    assert (found.value, found.where) == (f"{tmp_path}/libjemalloc.so.2", "driver")
    assert "LD_PRELOAD" not in {v.name for v in environment_variables(composed_run(TINY))}
