"""Compare the pin file with this machine: found, expected, what to do. Nothing is imported, started or changed."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from verl_patches.cluster import ascend_software
from verl_patches.cluster.pins import Line, Pins, load_pins, same_version
from verl_patches.cluster.support import shell_findings
from verl_patches.cluster.trees import FETCH, Trees
from verl_patches.patching.contract import PACKAGES
from verl_patches.patching.report import Finding, Report
from verl_patches.patching.switches import VARIABLE, parse
from verl_patches.upstream.installed import installed_root
from verl_patches.upstream.modified import roots_of, source_findings


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@dataclass(frozen=True)
class Machine:
    """What `compare` looks at; the defaults are this process and this machine."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ascend: Path = ascend_software.ROOT
    python: str = platform.python_version()
    distribution: Callable[[str], str | None] = _distribution
    root: Callable[[str], Path | None] = installed_root


def compare(
    line: str | None = None, machine: Machine | None = None, pins: Pins | None = None, trees: Trees | None = None
) -> Report:
    """Every pin of one line against `machine` and `trees`, then its shell, then as notes what the line cannot do.

    `line` None: the line of VERL_PATCHES, and with nothing set production, as everywhere. Raises ConfigError for a line
    that the pin file does not have.
    """
    machine, pins = machine or Machine(), pins or load_pins()
    name, why = (line, "--line") if line else _line_of(machine.environ)
    pinned = pins.line(name)
    found = [Finding("line", "fine", why, "", name), _python(pinned, machine)]
    sources = [*_sources(name, pinned, roots_of(name, trees or Trees(), machine.root))]
    once = {finding.name for finding in sources}
    found += [_distribution_finding(key, version, machine) for key, version in pinned.packages.items()
              if key not in once]
    found += [_system(key, version, machine) for key, version in pinned.system.items()]
    found += sources
    found += shell_findings(name, machine.environ)
    found += [Finding("not supported", "note", "", "", limit) for limit in pinned.limits]
    for entry in pins.unsupported_on(name):
        neutral = " or ".join(map(_word, entry.neutral))
        found.append(Finding(entry.key, "note", "config", neutral, "", f"{entry.why}; {entry.instead}"))
    return Report("versions", name, tuple(found))


def _line_of(environ: Mapping[str, str]) -> tuple[str, str]:
    given = environ.get(VARIABLE, "")
    return parse(given).line, VARIABLE if "line=" in given else f"{VARIABLE} names no line: production"


def _word(value: object) -> str:
    return "unset" if value is None else str(value)


def _python(pinned: Line, machine: Machine) -> Finding:
    fits, wanted = ".".join(machine.python.split(".")[:2]) in pinned.python, " or ".join(pinned.python)
    todo = "" if fits else f"run this with Python {wanted}: wheels and pins of the line are for it"
    return Finding("python", "fine" if fits else "problem", "", wanted, machine.python, todo)


def _distribution_finding(name: str, pinned: str, machine: Machine) -> Finding:
    found = machine.distribution(name)
    if found and same_version(pinned, found):
        return Finding(name, "fine", "", pinned, found)
    return Finding(name, "problem", "", pinned, found or "not installed",
                   f"install {name} {pinned}" + (" in place of it" if found else ""))


def _system(name: str, pinned: str, machine: Machine) -> Finding:
    found, where = ascend_software.installed(name, machine.environ, machine.ascend)
    if found and found.lower() == pinned.lower():
        return Finding(name, "fine", where, pinned, found)
    if found:
        return Finding(name, "problem", where, pinned, found, f"install {name} {pinned}")
    if name == "firmware" and ascend_software.installed("driver", machine.environ, machine.ascend)[0]:
        return Finding(name, "note", where, pinned, "not visible", "a container sees the driver only: look on its host")
    elsewhere = "" if name in ("driver", "firmware") else ", or source its set_env.sh if it lies elsewhere"
    return Finding(name, "problem", where, pinned, "no version file", f"install {name} {pinned}{elsewhere}")


def _sources(name: str, pinned: Line, roots: Mapping[str, Path]) -> Iterator[Finding]:
    """Each upstream package of the line once: what it is compared with its pin, or where it has to come from."""
    yield from source_findings(pinned, roots)
    by_pip = pinned.container.on_pip if pinned.container else ()
    of_package = {package: key for key, repository in pinned.repositories.items() for package in repository.packages}
    for package in PACKAGES[name]:
        if package in roots:
            continue
        key = of_package.get(package)
        if key is None:
            yield Finding(package, "problem", package, "an installed package", "not importable",
                          "bash scripts/setup.sh installs it")
            continue
        todo = f"{FETCH}; " + (f"then install it: python -m pip install --no-build-isolation --editable DIR/{key}"
                               if key in by_pip else "then give --upstream DIR, or put it on PYTHONPATH")
        yield Finding(key, "problem", package, f"commit {pinned.repositories[key].commit[:12]}", "not importable", todo)
