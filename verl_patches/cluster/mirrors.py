"""Where fetch-upstream gets a repository from: the pin's own URL, or a mirror, which is then the only source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from verl_patches.cluster.git_tree import has_commit
from verl_patches.cluster.pins import Repository
from verl_patches.errors import ConfigError


def sources(needed: Mapping[str, Repository], mirror: str | None) -> dict[str, str]:
    """{name: URL or folder to fetch from}.

    mirror: None: the pins' URLs. A URL (or host:path): mirror/NAME.git. A folder: NAME, NAME.git, OWNER+NAME or
    OWNER+NAME/repo in it, bare or not, that holds the commit. Nothing is contacted here. ConfigError lists every mirror
    that is missing from a folder, and the commands that make it.
    """
    if mirror is None:
        return {name: pin.url for name, pin in needed.items()}
    if not Path(mirror).is_dir() and re.match(r"[A-Za-z][\w+.-]*://|[\w.@-]+:", mirror):
        return {name: f"{mirror.rstrip('/')}/{name}.git" for name in needed}
    folder = Path(mirror).absolute()
    if not folder.is_dir():
        raise ConfigError(f"--mirror {mirror}: expected a folder of git mirrors, or a URL; found neither")
    found, faults, commands = {}, [], []
    for name, pin in needed.items():
        clones = [clone for clone in candidates(folder, name, pin.url) if _is_clone(clone)]
        holding = [clone for clone in clones if has_commit(clone, pin.commit)]
        if holding:
            found[name] = str(holding[0])
        elif clones:
            faults.append(f"{clones[0]} does not hold {name}'s commit {pin.commit}")
            commands.append(f"git -C {clones[0]} fetch {pin.url} '+refs/*:refs/*'")
        else:
            faults.append(f"no mirror of {name} (as {name}, {name}.git, OWNER+{name} or OWNER+{name}/repo)")
            commands.append(f"git clone --mirror {pin.url} {folder / name}.git")
    if faults:
        raise ConfigError(
            f"--mirror {folder}: {'; '.join(faults)}. Nothing was fetched. Make them on a machine with network:\n  "
            + "\n  ".join(commands) + "\nthen copy them here; or fetch the others alone: --only NAME"
        )
    return found


def candidates(folder: Path, name: str, url: str) -> list[Path]:
    """The places of one mirror in a folder. Owners are spelled differently from host to host: case does not matter."""
    owner = url.rstrip("/").replace(":", "/").split("/")[-2]
    there = {entry.name.lower(): entry for entry in sorted(folder.iterdir(), reverse=True)}

    def entry(text: str) -> Path:
        return folder / text if (folder / text).exists() else there.get(text.lower(), folder / text)

    joined = entry(f"{owner}+{name}")
    return [entry(name), entry(f"{name}.git"), joined, joined / "repo"]


def _is_clone(path: Path) -> bool:
    return (path / ".git").exists() or (path / "HEAD").is_file()
