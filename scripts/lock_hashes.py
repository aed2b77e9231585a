"""Write the hashes of line pypi's pins into its requirement files, or compare them; scripts/lock_a3.py has those of a3.

    python scripts/lock_hashes.py [--write]

A pin has the hashes of the files that pip may choose with the line's Pythons on Linux with glibc, x86_64 and aarch64,
as pip's index names them: of its wheels, and of its sdist where one of these machines has no wheel. uv asks the index,
with pip's address and certificates. Without --write hashes that the index no longer has are named; later files of a
pinned release change nothing. Exits: 0 the same; 1 not the same, or a pin has no file; 2 the index is not reachable.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import tomllib
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
FILES = (ROOT / "configs" / "requirements-pypi.txt", ROOT / "configs" / "requirements-pypi-nodeps.txt")
PYTHON = "3.11"  # the Python of line pypi
MACHINES = ("x86_64", "aarch64")
GLIBC = range(5, 51)  # manylinux_2_N


class NoFileError(Exception):
    """Report requirements that cannot be met; the message is uv's, or names the package."""


class UnreachableError(Exception):
    """Report a package index that cannot be reached."""


def compile_with_uv(requirements: Iterable[str], *options: str, preferred: str = "", name: str = "resolved.txt") -> str:
    """Return the text that `uv pip compile` writes to a file of this name; raise NoFileError or UnreachableError.

    preferred: versions to take where they fit, one NAME==VERSION a line.
    """
    env = dict(os.environ)
    for ours, pips in (("SSL_CERT_FILE", "PIP_CERT"), ("UV_DEFAULT_INDEX", "PIP_INDEX_URL")):
        if pips in env:
            env.setdefault(ours, env[pips])
    command = [
        f"{sysconfig.get_path('scripts')}/uv",
        "pip",
        "compile",
        "-",
        "--no-header",
        "--no-annotate",
        "--no-config",
    ]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, name)
        if preferred:
            output.write_text(preferred)  # uv keeps the versions of an existing output
        command += ["--output-file", str(output), *options]
        done = subprocess.run(command, input="\n".join(requirements), capture_output=True, text=True, env=env)
        if done.returncode:
            raise _uv_error(done.stderr.strip())
        return output.read_text()


def _uv_error(text: str) -> Exception:
    """Return uv's error as UnreachableError or NoFileError; an index that answers 404 for a file is reachable."""
    lost = "Failed to fetch" in text and "HTTP status client error" not in text
    return UnreachableError(text) if lost else NoFileError(text)


def wheel_tags(python: str, machine: str) -> set[Tag]:
    """Return the wheel tags that pip accepts with a CPython such as "3.11" on Linux with glibc."""
    version = tuple(map(int, python.split(".")))
    old = ("manylinux1", "manylinux2010", "manylinux2014")
    platforms = [f"{name}_{machine}" for name in (*(f"manylinux_2_{n}" for n in GLIBC), *old, "linux")]
    return {
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, f"cp{version[0]}{version[1]}", platforms),
    }


def file_hashes(pins: Mapping[str, str], python: str) -> dict[str, set[str]]:
    """Return {canonical name: sha256 of each file that pip may choose} for {name: version}; raise NoFileError."""
    words = ("--no-deps", "--universal", "--format", "pylock.toml", "--python-version", python)
    asked = [f"{name}=={version}" for name, version in pins.items()]
    packages = tomllib.loads(compile_with_uv(asked, *words, name="pylock.toml"))["packages"]
    return {canonicalize_name(package["name"]): _hashes(package, python) for package in packages}


def _hashes(package: Mapping, python: str) -> set[str]:
    found, machines_without = set(), []
    for machine in MACHINES:
        tags = wheel_tags(python, machine)
        fits = [wheel for wheel in package.get("wheels", ()) if tags & parse_wheel_filename(_file_name(wheel))[3]]
        found |= {wheel["hashes"]["sha256"] for wheel in fits}
        if not fits:
            machines_without.append(machine)
    if machines_without and "sdist" in package:
        found.add(package["sdist"]["hashes"]["sha256"])
    elif not found:
        pin = f"{package['name']}=={package['version']}"
        raise NoFileError(f"{pin}: expected a wheel of Python {python} for Linux or an sdist, found none")
    return found


def _file_name(wheel: Mapping) -> str:
    return wheel.get("name") or wheel["url"].rpartition("/")[2]


def with_hashes(pin: str, hashes: Iterable[str]) -> str:
    """Return an entry of a requirement file: `pin` and its hashes, which pip checks, one a line."""
    return " \\\n    ".join([pin, *(f"--hash=sha256:{value}" for value in sorted(hashes))])


def without_hashes(text: str) -> str:
    """Return the text of a requirement file without hashes."""
    return re.sub(r" \\\n +--hash=\S+", "", text)


def known_hashes(text: str) -> set[str]:
    """Return all hashes of a requirement file."""
    return set(re.findall(r"--hash=sha256:(\S+)", text))


def rewrite_hashes(text: str, ask: Callable[[dict[str, str]], dict[str, set[str]]], write: bool) -> str:
    """Return the text of a file of pins with the hashes that `ask` returns; unless `write`, only those it had."""
    lines, known = without_hashes(text).splitlines(), known_hashes(text)
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    hashes = ask(pins)
    for number, line in enumerate(lines):
        if line and not line.startswith("#"):
            found = hashes[canonicalize_name(line.partition("==")[0])]
            lines[number] = with_hashes(line, found if write else found & known)
    return "\n".join(lines) + "\n"


def report_changes(file: Path, before: str, after: str) -> int:
    """Print the lines of a file that differ, and return the exit code."""
    changed = sorted(set(before.splitlines()) ^ set(after.splitlines()))
    result = "differs from what was resolved; update it with --write" if changed else "up to date"
    print("\n".join([*changed, f"{file}: {result}"]))
    return 1 if changed else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the files")
    write, code = parser.parse_args(argv).write, 0
    for file in FILES:
        before = file.read_text()
        try:
            after = rewrite_hashes(before, lambda pins: file_hashes(pins, PYTHON), write)
        except UnreachableError as error:
            print(f"package index: cannot be reached; check PIP_INDEX_URL and the network: {error}", file=sys.stderr)
            return 2
        except NoFileError as error:
            print(f"{file}: {error}", file=sys.stderr)
            return 1
        if write:
            file.write_text(after)
        code = max(code, report_changes(file, file.read_text(), after))
    return code


if __name__ == "__main__":
    sys.exit(main())
