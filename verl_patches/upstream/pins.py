"""Read the pins of both lines (sets of upstream versions: pypi, a3) from configs/upstream.yaml, their only place."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from verl_patches.errors import ConfigError, our_command
from verl_patches.values import read_yaml

_PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS_DIR = (_PACKAGE.parent if (_PACKAGE.parent / "configs" / "upstream.yaml").is_file() else _PACKAGE) / "configs"
PIN_FILE = CONFIGS_DIR / "upstream.yaml"

CommitHash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Version = Annotated[str, StringConstraints(min_length=1)]  # a package's exact version, or a pattern such as 0.1*
LineName = Annotated[str, StringConstraints(pattern="^(pypi|a3)$")]
LineOrBoth = Annotated[str, StringConstraints(pattern="^(both|pypi|a3)$")]  # both: the same on both lines


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Repository(_Strict):
    """Pin one git repository at one commit. `packages`: top-level Python packages in its root.

    urls: its addresses, tried in this order. ref: the tag, branch or pull-request ref that contains the commit.
    by_pip: pip installs it; the others are on PYTHONPATH.
    """

    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    commit: CommitHash
    packages: tuple[str, ...]
    version: Version
    ref: str | None = None
    by_pip: bool = False


class Phrase(_Strict):
    """Hold one phrase of the table of pins in both languages."""

    en: str
    zh: str


class Unsupported(_Strict):
    """Describe a configuration key without effect, or with a wrong one, on `lines`, but for its `neutral` values."""

    key: str
    lines: tuple[LineName, ...]
    neutral: tuple[Any, ...]
    why: str
    instead: str


class Container(_Strict):
    """Name the base image of the line's Dockerfile, and the Python in it, which is one of the line's."""

    image: Annotated[str, StringConstraints(pattern=r"^\S+:[\w.-]*\d[\w.-]*$")]  # a versioned tag or a digest
    python: Version


class Line(_Strict):
    """Pin one upstream line: exact versions of Python packages and of Ascend software, and repositories.

    python: the minor versions that all of them support, the preferred one first. use, state: what the line is for and
    whether it was tried. engine: that of vLLM.
    """

    use: Phrase
    state: Phrase
    engine: Literal["V0", "V1"]
    python: Annotated[tuple[Version, ...], Field(min_length=1)]
    packages: Mapping[str, Version]
    repositories: Mapping[str, Repository]
    system: Mapping[str, Version] = Field(default_factory=dict)
    limits: tuple[str, ...] = ()
    container: Container | None = None

    def choose_repositories(self, only: Sequence[str] = ()) -> dict[str, Repository]:
        """Return the repositories that `only` names, or all if it is empty; ConfigError for an unknown name."""
        if not self.repositories:
            raise ConfigError(f"the line has no repositories; {our_command('setup.sh')} installs its packages")
        if unknown := [name for name in only if name not in self.repositories]:
            raise ConfigError(f"--only {', '.join(unknown)}: expected names among {', '.join(self.repositories)}")
        return {name: pin for name, pin in self.repositories.items() if not only or name in only}


class Pins(_Strict):
    """Hold the whole pin file.

    environment: {variable: {line, or "both": its readers: dotted names of upstream's symbols, or names of libraries}}.
    """

    lines: Mapping[str, Line]
    environment: Mapping[str, Mapping[LineOrBoth, tuple[str, ...]]]
    added_keys: Mapping[LineOrBoth, tuple[str, ...]]
    unsupported: tuple[Unsupported, ...]

    @field_validator("unsupported", mode="before")
    @classmethod
    def _expand_keys(cls, groups: Any) -> list[Any]:
        """Return one entry per key; a group in the file has `keys`, {key: neutral values}, and the fields of all."""
        entries: list[Any] = []
        for group in map(dict, groups):
            keys = group.pop("keys")
            entries += [{"key": key, "neutral": neutral, **group} for key, neutral in keys.items()]
        return entries

    def line(self, name: str) -> Line:
        """Return the pins of one line; ConfigError names the known lines."""
        if name not in self.lines:
            raise ConfigError(f"--line {name}: expected one of {', '.join(self.lines)}")
        return self.lines[name]

    def unsupported_on(self, line: str) -> tuple[Unsupported, ...]:
        """Return the entries of keys that `line` does not support."""
        return tuple(entry for entry in self.unsupported if line in entry.lines)

    def may_be_added(self, key: str, line: str) -> bool:
        """Return whether something on `line` reads a key that verl's own file does not list."""
        patterns = (*self.added_keys.get("both", ()), *self.added_keys.get(line, ()))
        return any(fnmatchcase(key, pattern) for pattern in patterns)

    def readers(self, variable: str, line: str) -> tuple[str, ...]:
        """Return the places where `line` reads an environment variable; KeyError if none is listed."""
        entry = self.environment[variable]
        return (*entry.get("both", ()), *entry.get(line, ()))

    def read_by(self, variable: str, line: str) -> str:
        """Return as text where `line` reads an environment variable, or else where other lines do ("LINE: place")."""
        others = [f"{other}: {place}" for other in self.lines for place in self.readers(variable, other)]
        return "; ".join(self.readers(variable, line) or others)


def same_version(pinned: str, found: str) -> bool:
    """Return whether an installed version matches the pin; a local part (+cpu) is compared only if the pin has one."""
    return fnmatchcase(found if "+" in pinned else found.partition("+")[0], pinned)


@functools.cache
def load_pins(path: Path = PIN_FILE) -> Pins:
    """Read and validate a pin file; ConfigError lists every key that is missing, unknown or of a wrong type."""
    try:
        return Pins.model_validate(read_yaml(path))
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(f"{path}: " + "\n  ".join(faults)) from error
