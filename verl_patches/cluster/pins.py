"""The pins of both upstream lines, read from configs/upstream.yaml, the only place where they are written."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from verl_patches.errors import ConfigError

PIN_FILE = Path(__file__).resolve().parents[2] / "configs" / "upstream.yaml"

Hash = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]
Version = Annotated[str, StringConstraints(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PullRequest(_Strict):
    """A pull request that was looked at: its head, and whether fetch-upstream merges it (and why, or why not)."""

    number: int
    head: Hash
    merge: bool
    why: str


class Repository(_Strict):
    """One git repository at one commit. `packages`: top-level Python packages in `folder` of it.

    `ref`: the tag, branch or pull-request ref that holds the commit. `tree`: the commit's tree hash, None where it is
    not known.
    """

    url: str
    commit: Hash
    tree: Hash | None
    packages: tuple[str, ...]
    version: Version
    ref: str | None = None
    folder: str = "."
    note: str = ""
    pull_requests: tuple[PullRequest, ...] = ()


class Line(_Strict):
    """One upstream line: exact versions of Python packages, of the Ascend software below, and repositories."""

    use: str
    state: str
    engine: Literal["V0", "V1"]
    python: Version
    packages: Mapping[str, Version]
    repositories: Mapping[str, Repository]
    system: Mapping[str, Version] = Field(default_factory=dict)

    def package_roots(self, folder: Path) -> dict[str, Path]:
        """{top-level package: the folder that holds it} for clones side by side in `folder`, named as in the pin file.

        Raises ConfigError that lists what is missing.
        """
        roots, missing = {}, []
        for name, repository in self.repositories.items():
            root = Path(folder) / name / repository.folder
            for package in repository.packages:
                roots[package] = root
                if not (root / package).is_dir():
                    missing.append(f"{name}/{package}")
        if missing:
            raise ConfigError(
                f"--upstream {folder}: expected clones of {', '.join(self.repositories)}, "
                f"found no {', '.join(missing)}. bash scripts/fetch_upstream.sh --dest DIR brings them"
            )
        return roots


class Pins(_Strict):
    """The whole pin file."""

    lines: Mapping[str, Line]

    def line(self, name: str) -> Line:
        """The pins of one line; ConfigError names the lines there are."""
        if name not in self.lines:
            raise ConfigError(f"--line {name}: expected one of {', '.join(self.lines)}")
        return self.lines[name]


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
