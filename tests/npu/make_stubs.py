"""Make stand-ins for the shared libraries that a package needs and this machine lacks, so that it can be imported.

    python tests/npu/make_stubs.py OUT torch-npu|torch      prints a line of what was made

torch-npu: the libraries of CANN; torch: those of CUDA, for a CUDA build on a machine without it. The wheel itself tells
what is missing: the libraries that the loader does not find for its .so files, and the symbols that neither they, nor
torch, nor the system define. Each symbol becomes a function that returns 0 (C++ vtables and type information become
zeroed memory), except those in the package's file in ANSWERS, which must return something or refuse. One library holds
all, under each missing name and with the symbols' versions; it logs each call (answers.c says where). Needs gcc, nm and
ldd. Exit codes: 0 made, 1 it cannot be made.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
ANSWERS = {"torch-npu": HERE / "answers.c", "torch": HERE / "cuda_answers.c"}
TOOLS = {"gcc": "gcc", "nm": "binutils", "ldd": "libc-bin"}  # command -> Debian package
DATA = ("_ZTV", "_ZTI", "_ZTS", "_ZTT")  # vtable, type information and its name, table of vtables
LIBRARY = "libstubs.so"


class NoStubs(Exception):
    """Report that the stubs cannot be made; the message says why and what to do."""


def run(*command: str, **env: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": _path(), **env})
    if done.returncode:
        raise NoStubs(f"{' '.join(command[:4])} ... failed with {done.returncode}: {done.stderr.strip()[-1500:]}")
    return done.stdout


def _path() -> str:
    lacking = [tool for tool in TOOLS if not shutil.which(tool)]
    if lacking:
        packages = " ".join(TOOLS[tool] for tool in lacking)
        raise NoStubs(f"not found on PATH: {', '.join(lacking)}; on Debian: apt-get install {packages}")
    return ":".join(dict.fromkeys(str(Path(shutil.which(tool)).parent) for tool in TOOLS))


def wheel_files(package: str) -> list[Path]:
    """Return the shared libraries of an installed package."""
    try:
        files = metadata.distribution(package).files or ()
    except metadata.PackageNotFoundError:
        raise NoStubs(f"{package} is not installed in {sys.prefix}; run: bash scripts/npu_venv.sh") from None
    found = [Path(file.locate()) for file in files if re.search(r"\.so(\.\d+)*$", file.name)]
    if not found:
        raise NoStubs(f"{package} in {sys.prefix} has no shared library; expected a wheel for Linux")
    return found


def symbols(file: Path, which: str) -> set[str]:
    """Return names that a library defines ("defined") or needs ("undefined", without weak ones), without versions."""
    lines = map(str.split, run("nm", "-D", f"--{which}-only", str(file)).splitlines())  # [address,] kind, name@version
    return {line[-1].partition("@")[0] for line in lines if len(line) > 1 and (which == "defined" or line[-2] == "U")}


def versions(files: list[Path], libraries: list[str]) -> str:
    """Return a linker script that gives each symbol the version, named as its library, by which `files` need it."""
    wanted: dict[str, set[str]] = {}
    for file in files:
        for line in run("nm", "-D", "--undefined-only", str(file)).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            if version in libraries:
                wanted.setdefault(version, set()).add(symbol)
    return "".join(f'"{name}" {{ {"; ".join(sorted(found))}; }};\n' for name, found in sorted(wanted.items()))


def missing(wheel: list[Path], torch: list[Path]) -> tuple[list[str], list[str]]:
    """Return (library names, symbols) that `wheel` needs and this machine lacks; torch: libraries loaded before it."""
    folders = ":".join(dict.fromkeys(str(file.parent) for file in wheel + torch))
    libraries: set[str] = set()
    system: set[Path] = {Path(sys.executable).resolve()}  # the interpreter's own symbols
    for file in (*wheel, *system):
        for line in run("ldd", str(file), LD_LIBRARY_PATH=folders).splitlines():
            name, _, place = line.strip().partition(" => ")
            if place == "not found":
                libraries.add(name)
            elif line.strip().startswith("/") or place.startswith("/"):
                system.add(Path((place or name).partition(" (")[0]))
    known = set().union(*(symbols(file, "defined") for file in {*wheel, *torch, *system}))
    wanted = set().union(*(symbols(file, "undefined") for file in wheel))
    return sorted(libraries), sorted(wanted - known)


def source(names: list[str], answers: Path) -> str:
    """Return C code for each symbol that `answers` does not define."""
    answered = set(re.findall(r"^\w[\w *]*\b(\w+)\(", answers.read_text(), re.MULTILINE))
    odd = [name for name in names if not re.fullmatch(r"\w+", name)]
    if odd:
        raise NoStubs(f"symbols that C cannot name: {odd[:5]}; expected letters, digits and _")
    return (
        "\n".join(
            f"char {name}[512];" if name.startswith(DATA) else f'long {name}(void) {{ note_call("{name}"); return 0; }}'
            for name in names
            if name not in answered
        )
        + "\n"
    )


def make(out: Path, package: str) -> str:
    """Build the stubs of `package` in `out` and return a line about them."""
    wheel = wheel_files(package)
    libraries, names = missing(wheel, wheel_files("torch"))
    if not libraries:
        raise NoStubs(f"nothing is missing: what {package} needs is installed here, use it")
    out.mkdir(parents=True, exist_ok=True)
    (out / "stubs.c").write_text(source(names, ANSWERS[package]))
    (out / "versions").write_text(versions(wheel, libraries))
    options = [f"-Wl,--version-script={out / 'versions'}"] if (out / "versions").read_text() else []
    sources = [str(out / "stubs.c"), str(ANSWERS[package])]
    run("gcc", "-shared", "-fPIC", "-fno-builtin", "-w", *options, "-o", str(out / LIBRARY), *sources)
    for name in libraries:
        link = out / name
        link.unlink(missing_ok=True)
        link.symlink_to(LIBRARY)
    return f"{len(names)} symbols of {len(libraries)} libraries: {' '.join(libraries)}"


if __name__ == "__main__":
    try:
        print(make(Path(sys.argv[1]), sys.argv[2]))
    except NoStubs as error:
        sys.exit(f"stubs for {sys.argv[2]}: {error}")
