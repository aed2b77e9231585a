"""Which Ascend software is installed, from the version files that its installers leave; nothing is started.

Formats, as installers of CANN 8 write them: `version=8.2.RC1` (ascend_toolkit_install.info), `version_dir=8.2.RC1`
(opp_kernel/version.info), `Ascend-cann-atb : 8.2.RC1` (nnal), `Version=25.2.0` (driver), `package_version=25.2.0` below
the firmware's own `Version=7.7...`. Only lines of that shape are read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/usr/local/Ascend")
_LINE = re.compile(r"^\s*([\w.-]+)\s*[=:]\s*(\S+)\s*$")


class Component(NamedTuple):
    """Where a component leaves its version: files by pattern below its home, then keys in order of preference."""

    home: str
    pattern: str
    keys: tuple[str, ...]


COMPONENTS = {
    "driver": Component("driver", "version.info", ("package_version", "Version")),
    "firmware": Component("firmware", "version.info", ("package_version", "Version")),
    "cann_toolkit": Component("toolkit", "*-linux/ascend_toolkit_install.info", ("version",)),
    "cann_kernels": Component("toolkit", "opp_kernel/version.info", ("version_dir", "Version")),
    "cann_nnal": Component("nnal", "version.info", ("Ascend-cann-atb",)),
}


def homes(environ: Mapping[str, str], root: Path = ROOT) -> dict[str, Path]:
    """Folders of the components: ASCEND_HOME_PATH and ATB_HOME_PATH (…/atb/cxx_abi_0) where set, else below `root`."""
    atb = environ.get("ATB_HOME_PATH")
    return {
        "driver": root / "driver",
        "firmware": root / "firmware",
        "toolkit": Path(environ.get("ASCEND_HOME_PATH") or root / "ascend-toolkit/latest"),
        "nnal": Path(atb).parent.parent if atb else root / "nnal/atb/latest",
    }


def installed(name: str, environ: Mapping[str, str], root: Path = ROOT) -> tuple[str | None, str]:
    """(version, file that says it) of one component; (None, where it was looked for) if no file says one."""
    component = COMPONENTS[name]
    home = homes(environ, root)[component.home]
    for file in sorted(home.glob(component.pattern)):
        found = dict(match.groups() for line in _lines(file) if (match := _LINE.match(line)))
        version = next((found[key] for key in component.keys if key in found), None)
        if version:
            return version.strip('"'), str(file)
    return None, str(home / component.pattern)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return []
