"""Upstream trees that a run takes its Python from, before what is installed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_patches.cluster.git_tree import git
from verl_patches.cluster.pins import load_pins
from verl_patches.errors import ConfigError
from verl_patches.upstream.installed import verl_config_dir

LINE = "a3"  # its pins are git repositories; the other line's packages come from the index
FETCH = "bash scripts/fetch_upstream.sh --dest DIR brings them"


@dataclass(frozen=True)
class Trees:
    """Folders that go on PYTHONPATH, in order; `verl` is the one of them with verl's configuration.

    `option`: how the user said so, for commands that are printed. Without folders everything is what is installed.
    """

    option: tuple[str, ...] = ()
    folders: tuple[Path, ...] = ()
    verl: Path | None = None


def trees_of(upstream: Path | None = None, verl_path: Path | None = None) -> Trees:
    """The trees of `--upstream DIR` (the line's repositories that pip does not install) or `--verl-path DIR`.

    vLLM is not among them: pip installs it (on the CPU the wheel of that version). Raises ConfigError for both at once
    and for a folder that lacks a repository.
    """
    if upstream is None:
        folder = None if verl_path is None else Path(verl_path).absolute()
        return Trees() if folder is None else Trees(("--verl-path", str(folder)), (folder,), folder)
    if verl_path is not None:
        raise ConfigError("--upstream has a verl too: leave --verl-path away")
    folder, pins = Path(upstream).absolute(), load_pins().line(LINE)
    by_pip = pins.container.on_pip if pins.container else ()
    plain = {name: repository for name, repository in pins.repositories.items() if name not in by_pip}
    missing = [f"{name}/{package}" for name, repository in plain.items() for package in repository.packages
               if not (folder / name / repository.folder / package).is_dir()]
    if missing:
        raise ConfigError(f"--upstream {upstream}: expected clones of {', '.join(plain)}, "
                          f"found no {', '.join(missing)}; {FETCH}")
    folders = {name: folder / name / repository.folder for name, repository in plain.items()}
    return Trees(("--upstream", str(folder)), tuple(folders.values()), folders["verl"])


def commit_of(folder: Path) -> str | None:
    """The commit that a tree stands at; None where it is not a git checkout of its own."""
    return git(folder, "rev-parse", "HEAD") if (folder / ".git").exists() else None


def require_trees(config: Any, trees: Trees) -> None:
    """ConfigError where the line of a composed configuration and the trees do not go together."""
    line, given = config.recipe.line, trees.option[:1] == ("--upstream",)
    if given and line != LINE:
        raise ConfigError(f"--upstream holds line {LINE}, but recipe.line is {line}: say --line {LINE} "
                          f"(recipe.line={LINE}), or leave --upstream away")
    if line == LINE and config.recipe.platform == "cpu" and not given:
        raise ConfigError(f"line {LINE} runs pinned sources, which are git only: give their folder with "
                          f"--upstream DIR; {FETCH}")


def verl_check(line: str, trees: Trees) -> tuple[bool, str]:
    """(True if it is the version that `line` pins, one sentence): the verl whose configuration is composed over."""
    package = verl_config_dir(trees.verl).parents[1]
    file, pins = package / "version" / "version", load_pins().line(line)
    found = file.read_text().strip() if file.is_file() else "of an unknown version"
    pin = pins.repositories.get("verl")
    wanted = pin.version if pin else pins.packages["verl"]
    if found == wanted:
        return True, f"composed over verl {found}, {package}"
    todo = (f"give the folder of the line's sources with --upstream DIR, or its verl on PYTHONPATH; {FETCH}" if pin
            else "leave --upstream and --verl-path away; bash scripts/setup.sh installs it")
    return False, (f"composed over verl {found}, {package}, but line {line} pins {wanted}"
                   + (f" ({pin.commit[:12]})" if pin else "") + f": {todo}")


def require_verl(line: str, trees: Trees) -> None:
    """ConfigError where a run would start over another verl than `line` pins."""
    fits, said = verl_check(line, trees)
    if not fits:
        raise ConfigError(said)
