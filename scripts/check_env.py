"""Compare this environment with the pin files. Standard library only; setup.sh runs it with the venv's Python.

    python -I scripts/check_env.py [--stamp FILE | --write-stamp FILE] [--project ROOT] PINS...

Prints one line per finding and exits 1 where something must be repaired:
    missing NAME==VERSION      not installed, or another version is
    damaged NAME==VERSION      installed, but files of it are gone or empty; VERSION is what must be installed again:
                               the pin's, or the installed one where that has a local part, such as 2.13.0+cpu
    stamp REASON               the last set-up did not finish, or was made from other pins or another Python
    project REASON             the project itself is not installed from ROOT, or was before pyproject.toml changed
    cuda NAME                  a CUDA package came along (reported, not an error)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

PROJECT_NAME = "verl-patches"
HASH_PATTERN = re.compile(r"--hash=sha256:[0-9a-f]{64}")
CUDA_PATTERN = re.compile(r"(nvidia-.*|cuda-.*|triton|pytorch-triton)$")


def canonical_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def read_pins(files: list[Path]) -> dict[str, str]:
    """Return {canonical name: "NAME==VERSION"}; ValueError for any other line, and for two versions of a name."""
    pins: dict[str, str] = {}
    for file in files:
        for number, line in enumerate(file.read_text().splitlines(), 1):
            line = line.partition("#")[0].strip().removesuffix("\\").strip()
            if not line or (pins and HASH_PATTERN.fullmatch(line)):
                continue
            if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+", line):
                raise ValueError(f"{file}:{number}: expected NAME==VERSION, found {line!r}")
            if pins.setdefault(canonical_name(line.partition("==")[0]), line) != line:
                raise ValueError(f"{file}:{number}: {line} is already pinned to another version")
    return pins


def distributions_by_name(dists: Iterable[metadata.Distribution]) -> dict[str, metadata.Distribution]:
    """Return {canonical name: distribution}; of two with one name, the first on the path, which Python imports."""
    return {canonical_name(d.metadata["Name"]): d for d in reversed([*dists]) if d.metadata["Name"]}


def is_damaged(dist: metadata.Distribution) -> bool:
    """Return whether files of a distribution are missing or empty; edited files and missing .pyc files are fine."""
    for file in dist.files or ():
        path = Path(file.locate())
        if file.suffix != ".pyc" and (not path.exists() or (file.size and path.stat().st_size == 0)):
            return True
    return not dist.files


def package_findings(pins: dict[str, str], dists: dict[str, metadata.Distribution]) -> Iterator[str]:
    for name, pin in pins.items():
        wanted, dist = pin.partition("==")[2], dists.get(name)
        # a pin without a local part takes any build of that version, as pip does: 2.13.0 takes 2.13.0+cpu
        if dist is None or wanted not in (dist.version, dist.version.partition("+")[0]):
            yield f"missing {pin}"
        elif is_damaged(dist):
            local = "+" in dist.version  # then the same build is installed again
            yield f"damaged {pin.partition('==')[0]}=={dist.version}" if local else f"damaged {pin}"


def project_findings(root: Path, dists: dict[str, metadata.Distribution]) -> Iterator[str]:
    dist = dists.get(PROJECT_NAME)
    if dist is None or is_damaged(dist):
        yield "project is not installed"
        return
    url = json.loads(dist.read_text("direct_url.json") or "{}").get("url")
    if url != root.as_uri():
        yield f"project is installed from {url}, not from {root.as_uri()}"


def cuda_findings(dists: dict[str, metadata.Distribution]) -> Iterator[str]:
    yield from (f"cuda {name}=={dist.version}" for name, dist in sorted(dists.items()) if CUDA_PATTERN.match(name))
    version = Path(str(dists["torch"].locate_file("torch/version.py"))) if "torch" in dists else None
    if version and version.is_file():
        found = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", version.read_text(), re.MULTILINE)
        if found:
            yield f"cuda torch=={dists['torch'].version} is built for CUDA {found[1]}"


def digests(pin_files: list[Path], root: Path | None) -> dict[str, str]:
    """Return the content of the stamp: digests of the sources of the stack and of the project's own metadata."""

    def digest(files: list[Path], *words: str) -> str:
        h = hashlib.sha256("\0".join(words).encode())
        for file in files:
            h.update(b"\0" + file.read_bytes())
        return h.hexdigest()

    found = {"stack": digest(pin_files, sys.version.split()[0], sys.prefix)}
    if root:
        found["project"] = digest([root / "pyproject.toml", root / "requirements.txt"], str(root))
    return found


def stamp_findings(stamp: Path, wanted: dict[str, str]) -> Iterator[str]:
    try:
        found = json.loads(stamp.read_text())
    except (OSError, ValueError):
        yield "stamp is missing: the last set-up did not finish"
        return
    if found.get("stack") != wanted["stack"]:
        yield "stamp differs: it was made from other pins, with another Python or in another folder"
    if found.get("project") != wanted.get("project"):
        yield "project changed: its pyproject.toml, requirements.txt or folder"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pins", nargs="+", type=Path, help="requirement files with exact pins")
    parser.add_argument("--stamp", type=Path, help="also require this stamp file to match")
    parser.add_argument("--write-stamp", type=Path, help="write the stamp file if nothing must be repaired")
    parser.add_argument(
        "--project", type=Path, metavar="ROOT", help="also require the project to be installed from ROOT"
    )
    args = parser.parse_args()
    pins = read_pins(args.pins)
    dists = distributions_by_name(metadata.distributions())
    findings = list(package_findings(pins, dists))
    if args.project:
        findings += project_findings(args.project, dists)
    wanted = digests(args.pins, args.project)
    if args.stamp:
        findings += stamp_findings(args.stamp, wanted)
    if args.write_stamp and not findings:
        args.write_stamp.write_text(json.dumps(wanted) + "\n")
    for line in (*findings, *cuda_findings(dists)):
        print(line)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
