"""Find upstream's git checkouts, which a run imports before installed packages, and run git commands in them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from verl_patches.errors import Check, ConfigError, RecipeError, our_command
from verl_patches.patching.contract import installed_root
from verl_patches.platform import NO_DEVICE
from verl_patches.spec import RunSpec, Trees
from verl_patches.upstream.pins import load_pins

GIT_LINE = "a3"  # the line whose pins are git repositories; the other line's packages come from the index
FETCH_HINT = f"{our_command('fetch_upstream.sh', '--dest', 'DIR')} clones them"
SETUP_HINT = f"{our_command('setup.sh')} installs it"
VERL_CONFIG = "ppo_megatron_trainer"


def git(folder: Path, *args: str) -> str:
    """Return the standard output of a git command in `folder`, the root of a work tree; file modes are ignored.

    Raises RecipeError with git's own message where it fails.
    """
    root = Path(os.path.abspath(folder))
    tree = [f"--git-dir={root / '.git'}", f"--work-tree={root}"]  # explicit, so that another account may own the clone
    command = ["git", "--no-optional-locks", "-c", "core.fileMode=false", *tree, *args]
    done = subprocess.run(command, cwd=root, capture_output=True, encoding="utf-8", errors="replace")
    if done.returncode:
        raise RecipeError(f"git {args[0]} in {folder}: {done.stderr.strip()}")
    return done.stdout


def find_trees(upstream: Path | None = None) -> Trees:
    """Return the trees of `--upstream DIR`: GIT_LINE's repositories that pip does not install.

    vLLM is not among them: pip installs it (on the CPU the wheel of its version). Raises ConfigError for a folder that
    lacks a repository.
    """
    if upstream is None:
        return Trees()
    folder, pins = Path(upstream).absolute(), load_pins().line(GIT_LINE)
    plain = {name: repository for name, repository in pins.repositories.items() if not repository.by_pip}
    wanted = [f"{name}/{package}" for name, repository in plain.items() for package in repository.packages]
    missing = [name for name in wanted if not (folder / name).is_dir()]
    if missing:
        raise ConfigError(
            f"--upstream {upstream}: expected clones of {', '.join(plain)}, found no {', '.join(missing)}; {FETCH_HINT}"
        )
    return Trees(("--upstream", str(folder)), tuple(folder / name for name in plain), folder / "verl")


def add_platform_trees(platform: str, trees: Trees) -> Trees:
    """Return `trees`, on platform npu_emulated with the clone of vllm-ascend beside verl's.

    pip cannot build vllm-ascend there: its compiled part is emulated. Raises ConfigError where there is no such folder.
    """
    if platform != "npu_emulated" or trees.verl is None:
        return trees
    folder = trees.verl.parent / "vllm-ascend"
    if not (folder / "vllm_ascend").is_dir():
        raise ConfigError(
            f"platform npu_emulated: expected a clone of vllm-ascend in {folder}, found none; {FETCH_HINT}"
        )
    return replace(trees, folders=(*trees.folders, folder))


def head_commit(folder: Path) -> str | None:
    """Return the commit that is checked out in `folder`; None where it is not the root of a git checkout."""
    return git(folder, "rev-parse", "HEAD").strip() if (folder / ".git").exists() else None


def verl_config_dir(verl: Path | None = None) -> Path:
    """Return verl's trainer/config folder, of the checkout `verl` or the installed verl; else ConfigError."""
    root = installed_root("verl") if verl is None else verl
    folder = root / "verl" / "trainer" / "config" if root else None
    if folder is None or not (folder / f"{VERL_CONFIG}.yaml").is_file():
        wanted = "the installed package verl" if verl is None else str(verl)
        raise ConfigError(f"{wanted}: expected trainer/config/{VERL_CONFIG}.yaml, found none; {SETUP_HINT}")
    return folder.resolve()


def require_trees(run: RunSpec) -> None:
    """Raise ConfigError where the line of a run does not fit its trees."""
    line, given = run.line, bool(run.trees.option)
    if given and line != GIT_LINE:
        raise ConfigError(
            f"--upstream contains line {GIT_LINE}, but recipe.line is {line}: give --line {GIT_LINE} "
            f"(recipe.line={GIT_LINE}), or omit --upstream"
        )
    if line == GIT_LINE and run.platform in NO_DEVICE and not given:
        raise ConfigError(
            f"line {GIT_LINE} on platform {run.platform}: expected a folder of the pinned git sources, found none; "
            f"give --upstream DIR; {FETCH_HINT}"
        )


def compare_verl_version(line: str, trees: Trees) -> tuple[bool, str]:
    """Return (whether the configuration's verl is the version that `line` pins, one sentence about it)."""
    package = verl_config_dir(trees.verl).parents[1]
    file, pins = package / "version" / "version", load_pins().line(line)
    found = file.read_text().strip() if file.is_file() else "of an unknown version"
    pin = pins.repositories.get("verl")
    wanted = pin.version if pin else pins.packages["verl"]
    if found == wanted:
        return True, f"configuration taken from verl {found} ({package})"
    todo = SETUP_HINT
    if pin:
        wanted, todo = f"{wanted} ({pin.commit[:12]})", f"give --upstream DIR; {FETCH_HINT}"
    return False, f"configuration taken from verl {found} ({package}), but line {line} pins {wanted}; {todo}"


def verl_checks(run: RunSpec) -> Iterator[Check]:
    """Check the version of verl: a plan accepts any, a start the line's own (or another with recipe.drift=warn)."""
    fits, sentence = compare_verl_version(run.line, run.trees)
    starts = fits or run.recipe.drift == "warn"
    yield Check("verl", True, sentence if starts else f"a start is refused: {sentence}", note=not fits)
