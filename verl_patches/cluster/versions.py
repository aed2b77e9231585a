"""Compare the pin file with this machine: found, expected, what to do. Nothing is imported, started or changed."""

from __future__ import annotations

import importlib.util
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from verl_patches.cluster import ascend_software
from verl_patches.cluster.git_tree import git
from verl_patches.cluster.pins import Line, Pins, Repository, load_pins, same_version
from verl_patches.cluster.support import shell_findings
from verl_patches.cluster.upstream_tree import dirt, faults
from verl_patches.patching.engine import PatchError
from verl_patches.patching.report import Finding, Report
from verl_patches.patching.switches import VARIABLE, parse

FETCH = "bash scripts/fetch_upstream.sh --line {line}, then put the clones on PYTHONPATH"


def _distribution(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _package(name: str) -> Path | None:
    """The folder of a top-level package, found without importing it."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).resolve() if places else None


@dataclass(frozen=True)
class Machine:
    """What `compare` looks at; the defaults are this process and this machine."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    ascend: Path = ascend_software.ROOT
    python: str = platform.python_version()
    distribution: Callable[[str], str | None] = _distribution
    package: Callable[[str], Path | None] = _package


def compare(line: str | None = None, machine: Machine | None = None, pins: Pins | None = None) -> Report:
    """Every pin of one line against `machine`, then its shell, then as notes what the line cannot do.

    `line` None: the line of VERL_PATCHES, and with nothing set production, as everywhere. Raises ConfigError for a line
    that the pin file does not have.
    """
    machine, pins = machine or Machine(), pins or load_pins()
    name, why = (line, "--line") if line else _line_of(machine.environ)
    pinned = pins.line(name)
    found = [Finding("line", "fine", why, "", name), _python(pinned, machine)]
    found += [_distribution_finding(key, version, machine) for key, version in pinned.packages.items()]
    found += [_system(key, version, machine) for key, version in pinned.system.items()]
    for key, repository in pinned.repositories.items():
        found += _repository(name, key, repository, machine)
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


def _repository(line: str, name: str, repository: Repository, machine: Machine) -> Iterator[Finding]:
    for package in repository.packages:
        place, expected = machine.package(package), f"{name} at {repository.commit[:12]}"
        where, todo = str(place or package), FETCH.format(line=line)
        if place is None:
            yield Finding(package, "problem", where, expected, "not importable", todo)
            continue
        root = _checkout(place, repository)
        if root is None:
            version = machine.distribution(name)
            if version and same_version(repository.version, version):
                yield Finding(package, "note", where, expected, f"an installed {version}", "its commit cannot be told")
            else:
                yield Finding(package, "problem", where, expected, "no git checkout", todo)
            continue
        wrong, changed = faults(root, repository), dirt(root)
        if wrong:
            yield Finding(package, "problem", str(root), expected, "; ".join(wrong), todo)
        elif changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            yield Finding(package, "note", str(root), expected, f"changed files: {', '.join(changed[:3])}{more}",
                          f"git -C {root} status shows them")
        else:
            yield Finding(package, "fine", str(root), expected, repository.commit[:12])


def _checkout(place: Path, repository: Repository) -> Path | None:
    """The root of the checkout that `place` is a package of; None where it was copied or installed from a wheel."""
    root = place.parent
    for _ in Path(repository.folder).parts:
        root = root.parent
    try:
        top = git(root, "rev-parse", "--show-toplevel")
    except PatchError:
        return None
    return root if Path(top).resolve() == root.resolve() else None

