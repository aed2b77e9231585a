"""The pins of both upstream lines, read from configs/upstream.yaml, the only place where they are written."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from verl_patches.errors import ConfigError

PIN_FILE = Path(__file__).resolve().parents[2] / "configs" / "upstream.yaml"

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Version = Annotated[str, StringConstraints(min_length=1)]  # of a package: exact, or a pattern such as 0.1*
Kind = Annotated[str, StringConstraints(pattern=r"^(int|text|path|\d+\.\.\d+)$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PullRequest(_Strict):
    """A pull request that was reviewed and is not merged into the pin: its head and the reason."""

    number: int
    head: Hash
    why: str


class Repository(_Strict):
    """One git repository at one commit. `packages`: top-level Python packages in `folder` of it.

    `ref`: the tag, branch or pull-request ref that holds the commit. `tree`: the commit's tree hash, None where it is
    not known. `generated`: files that installing from the tree writes into it.
    """

    url: str
    commit: Hash
    tree: Hash | None
    packages: tuple[str, ...]
    version: Version
    ref: str | None = None
    folder: str = "."
    note: str = ""
    generated: tuple[str, ...] = ()
    pull_requests: tuple[PullRequest, ...] = ()


class Words(_Strict):
    """One phrase of the README's table in both languages."""

    en: str
    zh: str


class Source(_Strict):
    """Where the source of an installed wheel can be read; it is not cloned."""

    url: str
    ref: str
    commit: Hash


class Variable(_Strict):
    """One environment variable that a run sets, or that a user's shell must not set to another value.

    read_by: places by line ("both": the same on both), "package/file.py:line" or the name of a library.
    allowed: the values, or int, A..B, path (absolute), text.
    """

    read_by: Mapping[Literal["both", "pypi", "a3"], tuple[str, ...]]
    allowed: Kind | tuple[str, ...]
    note: str = ""

    def reads(self, line: str) -> tuple[str, ...]:
        """Where `line` reads it; nothing if it does not."""
        return (*self.read_by.get("both", ()), *self.read_by.get(line, ()))

    def accepts(self, value: str) -> bool:
        """True if the reader understands `value`."""
        if not isinstance(self.allowed, str):
            return value in self.allowed
        if self.allowed in ("text", "path"):
            return self.allowed == "text" or value.startswith("/")
        whole = re.fullmatch(r"-?\d+", value)
        low, _, high = self.allowed.partition("..")
        return bool(whole) and (not high or int(low) <= int(value) <= int(high))

    @property
    def allowed_text(self) -> str:
        """The allowed values in words."""
        words = {"int": "a whole number", "path": "an absolute path", "text": "any text"}
        return words.get(self.allowed, self.allowed) if isinstance(self.allowed, str) else " or ".join(self.allowed)


class Unsupported(_Strict):
    """One configuration key that `lines` cannot act on: any value but a `neutral` one is refused.

    planned: --dry-run shows such a run all the same, a start is refused (its rows are still to come).
    """

    key: str
    lines: tuple[Literal["pypi", "a3"], ...]
    neutral: tuple[Any, ...]
    why: str
    instead: str
    planned: bool = False


class GivenByVerl(_Strict):
    """Keywords that verl itself gives to vLLM's LLM, `at` a place by line: the key that decides each, or its value."""

    at: Mapping[Literal["pypi", "a3"], str]
    keywords: Mapping[str, str]


class RolloutKeys(_Strict):
    """Keys of actor_rollout_ref.rollout: {key: {line: who reads it there}}; other lines cannot act on it."""

    acts: Mapping[str, Mapping[Literal["pypi", "a3"], str]]
    given_by_verl: GivenByVerl


class Apex(_Strict):
    """Where apex for Ascend is built from: its repository, and NVIDIA's, which its build script patches.

    commit: None where no reviewed one is known, so `ref` decides. build_needs: what pip must install before.
    """

    url: str
    ref: str
    commit: Hash | None
    base_url: str
    build_needs: tuple[str, ...]


class Requirements(_Strict):
    """A requirements file of a repository, without the packages that other pins decide."""

    file: str
    without: tuple[str, ...] = ()


class Container(_Strict):
    """What the line's Dockerfile and its start command need beyond versions and repositories.

    cann_packages: file names in the order of installation, {key} is a version of `system`. on_pip: repositories that
    pip installs, the others are on PYTHONPATH. requirements: by repository. devices: /dev/davinci0 and up. mounts:
    SOURCE:TARGET[:ro]. shm_size: a limit of /dev/shm, not a reservation. python: that of `image`, one of the line's.
    """

    name: str
    image: Annotated[str, StringConstraints(pattern=r"^\S+:[\w.-]*\d[\w.-]*$")]  # a versioned tag or a digest
    python: Version
    os_packages: tuple[str, ...]
    jemalloc: str
    cann_packages: tuple[str, ...]
    set_env: tuple[str, ...]
    driver_libraries: tuple[str, ...]
    build_libraries: str
    apex: Apex
    build_needs: tuple[str, ...]
    on_pip: tuple[str, ...]
    requirements: Mapping[str, Requirements]
    devices: int
    device_files: tuple[str, ...]
    mounts: tuple[str, ...]
    shm_size: str
    ulimits: Mapping[str, str]
    privileged: bool


class Line(_Strict):
    """One upstream line: exact versions of Python packages, of the Ascend software below, and repositories.

    python: the minor versions that all of them support, the preferred one first.
    """

    use: Words
    state: Words
    engine: Literal["V0", "V1"]
    python: Annotated[tuple[Version, ...], Field(min_length=1)]
    packages: Mapping[str, Version]
    repositories: Mapping[str, Repository]
    system: Mapping[str, Version] = Field(default_factory=dict)
    sources: Mapping[str, Source] = Field(default_factory=dict)
    limits: tuple[str, ...] = ()
    container: Container | None = None

    @model_validator(mode="after")
    def _the_base_image_has_a_python_of_the_line(self) -> Line:
        if self.container and self.container.python not in self.python:
            raise ValueError(f"container.python is {self.container.python}, that of {self.container.image}: "
                             f"expected one of the line's {', '.join(self.python)}")
        return self

    def package_roots(self, folder: Path, part: bool = False) -> dict[str, Path]:
        """{top-level package: the folder that holds it} for clones side by side in `folder`, named as in the pin file.

        Raises ConfigError that lists what is missing; `part`: those that are there will do, if there is one.
        """
        roots, missing = {}, []
        for name, repository in self.repositories.items():
            root = Path(folder) / name / repository.folder
            for package in repository.packages:
                if (root / package).is_dir():
                    roots[package] = root
                else:
                    missing.append(f"{name}/{package}")
        if missing and not (part and roots):
            raise ConfigError(
                f"--upstream {folder}: expected clones of {', '.join(self.repositories)}, "
                f"found no {', '.join(missing)}; bash scripts/fetch_upstream.sh --dest DIR clones them"
            )
        return roots


class Pins(_Strict):
    """The whole pin file."""

    lines: Mapping[str, Line]
    environment: Mapping[str, Variable]
    read_nowhere: Mapping[str, str]
    rollout_keys: RolloutKeys
    unsupported: tuple[Unsupported, ...]

    def line(self, name: str) -> Line:
        """The pins of one line; ConfigError names the lines there are."""
        if name not in self.lines:
            raise ConfigError(f"--line {name}: expected one of {', '.join(self.lines)}")
        return self.lines[name]

    def unsupported_on(self, line: str) -> tuple[Unsupported, ...]:
        """The keys that `line` cannot act on."""
        return tuple(entry for entry in self.unsupported if line in entry.lines)

    def read_by(self, variable: str, line: str) -> str:
        """Where `line` reads an environment variable, in one text; else where another line does, which it names.

        Raises KeyError for a variable that the pin file does not list.
        """
        entry = self.environment[variable]
        others = [f"{other}: {place}" for other in self.lines for place in entry.reads(other)]
        return "; ".join(entry.reads(line) or others)


def same_version(pinned: str, found: str) -> bool:
    """True if an installed version is the pinned one; a local part (2.13.0+cpu) counts only where the pin has one."""
    return fnmatchcase(found if "+" in pinned else found.partition("+")[0], pinned)


@functools.cache
def load_pins(path: Path = PIN_FILE) -> Pins:
    """Read and check a pin file; ConfigError lists every key that is missing, unknown or of another kind."""
    try:
        return Pins.model_validate(yaml.safe_load(path.read_text()))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); it belongs to the checkout") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: expected YAML, found {error}") from error
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()]
        raise ConfigError(f"{path}: " + "\n  ".join(faults)) from error
