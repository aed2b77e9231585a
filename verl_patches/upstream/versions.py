"""Compare the pins of a line with this machine, for the command `versions`. Nothing is imported, started or changed.

Versions of Ascend software come from the files that the installers of CANN 8 write: `version=8.2.RC1`
(ascend_toolkit_install.info), `version_dir=8.2.RC1` (opp_kernel/version.info), `Ascend-cann-atb : 8.2.RC1` (nnal),
`Version=25.2.0` (driver), `package_version=25.2.0` after the firmware's own `Version=7.7...`.
"""

from __future__ import annotations

import glob
import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from verl_patches.patching.contract import PACKAGES
from verl_patches.patching.report import Finding, Report
from verl_patches.patching.switches import PATCHES_VAR, parse_switches
from verl_patches.upstream.checkouts import FETCH_HINT, SETUP_HINT, Trees
from verl_patches.upstream.modified import package_roots, source_findings
from verl_patches.upstream.pins import Line, load_pins, same_version

_VERSION_LINE = re.compile(r"^\s*([\w.-]+)\s*[=:]\s*(\S+)\s*$")


def _installed_version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Machine:
    """Describe the machine that `compare_pins` inspects; the defaults are this process and this machine."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ascend: Path = Path("/usr/local/Ascend")
    python: str = platform.python_version()
    distribution: Callable[[str], str | None] = _installed_version


def compare_pins(line: str | None = None, machine: Machine | None = None, trees: Trees | None = None) -> Report:
    """Compare the pins of one line with `machine` and `trees`; notes list the line's limits.

    The default line is that of VERL_PATCHES, else a3 (production). Raises ConfigError for a line that is not in the pin
    file.
    """
    machine, pins = machine or Machine(), load_pins()
    name = line or parse_switches(machine.environ.get(PATCHES_VAR, "")).line
    pinned = pins.line(name)
    roots = package_roots(name, trees or Trees())
    sources = [*source_findings(pinned, roots)]
    named = {package: key for key, repository in pinned.repositories.items() for package in repository.packages}
    for package in (each for each in PACKAGES[name] if each not in roots):
        todo = f"{FETCH_HINT}; then install it, or give --upstream DIR" if package in named else SETUP_HINT
        sources.append(Finding(named.get(package, package), "problem", package, "a package", "not importable", todo))
    compared = {finding.name for finding in sources}
    findings = [_python_finding(pinned, machine)]
    findings += [
        _package_finding(key, version, machine) for key, version in pinned.packages.items() if key not in compared
    ]
    findings += [_ascend_finding(key, version, machine) for key, version in pinned.system.items()]
    findings += sources
    findings += [Finding("not supported", "note", "", "", limit) for limit in pinned.limits]
    return Report("versions", name, tuple(findings))


def installed_line() -> str | None:
    """Return the line whose pinned packages are all installed; None without one."""
    machine = Machine()
    for name, line in load_pins().lines.items():
        if all(_package_finding(key, version, machine).state == "fine" for key, version in line.packages.items()):
            return name
    return None


def _python_finding(pinned: Line, machine: Machine) -> Finding:
    fits, wanted = ".".join(machine.python.split(".")[:2]) in pinned.python, " or ".join(pinned.python)
    todo = "" if fits else f"run this with Python {wanted}, which the line's pins support"
    return Finding("python", "fine" if fits else "problem", "", wanted, machine.python, todo)


def _package_finding(name: str, pinned: str, machine: Machine) -> Finding:
    found = machine.distribution(name)
    if found and same_version(pinned, found):
        return Finding(name, "fine", "", pinned, found)
    todo = f"install {name} {pinned}" + (" in place of it" if found else "")
    return Finding(name, "problem", "", pinned, found or "not installed", todo)


def _ascend_finding(name: str, pinned: str, machine: Machine) -> Finding:
    found, where = _ascend_version(name, machine)
    if found and found.lower() == pinned.lower():
        return Finding(name, "fine", where, pinned, found)
    if found:
        return Finding(name, "problem", where, pinned, found, f"install {name} {pinned}")
    if name == "firmware" and _ascend_version("driver", machine)[0]:
        return Finding(name, "note", where, pinned, "not visible", "a container has the driver only: look on its host")
    elsewhere = "" if name in ("driver", "firmware") else ", or source its set_env.sh if it is installed elsewhere"
    return Finding(name, "problem", where, pinned, "no version file", f"install {name} {pinned}{elsewhere}")


def _ascend_version(name: str, machine: Machine) -> tuple[str | None, str]:
    """Return (version, its file) of one component; (None, the pattern that was searched) if no file has one.

    ASCEND_HOME_PATH and ATB_HOME_PATH (.../atb/cxx_abi_0), if set, name the homes of toolkit and NNAL.
    """
    root, atb = machine.ascend, machine.environ.get("ATB_HOME_PATH")
    toolkit = Path(machine.environ.get("ASCEND_HOME_PATH") or root / "ascend-toolkit/latest")
    nnal = Path(atb).parent.parent if atb else root / "nnal/atb/latest"
    pattern, keys = {  # a file, and its keys in order of preference
        "driver": (root / "driver/version.info", ("package_version", "Version")),
        "firmware": (root / "firmware/version.info", ("package_version", "Version")),
        "cann_toolkit": (toolkit / "*-linux/ascend_toolkit_install.info", ("version",)),
        "cann_kernels": (toolkit / "opp_kernel/version.info", ("version_dir", "Version")),
        "cann_nnal": (nnal / "version.info", ("Ascend-cann-atb",)),
    }[name]
    for file in sorted(glob.glob(str(pattern))):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        values = {match[1]: match[2] for line in lines if (match := _VERSION_LINE.match(line))}
        version = next((values[key] for key in keys if key in values), None)
        if version:
            return version.strip('"'), file
    return None, str(pattern)
