"""git checkouts of upstream: the folders that a run imports from before installed packages, and the git command."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from verl_patches.errors import Check, ConfigError, RecipeError
from verl_patches.patching.contract import installed_root
from verl_patches.platform import NO_DEVICE
from verl_patches.spec import RunSpec, Trees
from verl_patches.upstream.pins import load_pins

LINE = "a3"  # its pins are git repositories; the other line's packages come from the index
FETCH = "bash scripts/fetch_upstream.sh --dest DIR clones them"
VERL_CONFIG = "ppo_megatron_trainer"
GIT_S = 120  # time limit of a local git command

# no hooks and no personal setting that changes a tree; network settings (proxy, certificates, insteadOf) stay in force
_SETTINGS = """
    core.hooksPath=/dev/null core.attributesFile=/dev/null core.excludesFile=/dev/null
    core.autocrlf=false core.fileMode=false core.fsmonitor=false core.quotePath=false core.splitIndex=false gc.auto=0
    submodule.recurse=false http.lowSpeedLimit=1000 http.lowSpeedTime=120
""".split()  # the last two: bytes/s and s, so that a transfer that stalls ends
# listed by `git rev-parse --local-env-vars`: an outer git (a hook, a rebase) may have set them
_OUTER = """
    GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE GIT_OBJECT_DIRECTORY GIT_ALTERNATE_OBJECT_DIRECTORIES GIT_COMMON_DIR
    GIT_NAMESPACE GIT_PREFIX GIT_SHALLOW_FILE GIT_GRAFT_FILE
""".split()


def git(folder: Path, *args: str, limit_s: float = GIT_S, index: Path | None = None) -> str:
    """Standard output of a git command in `folder`, which must be the root of a work tree for most commands.

    limit_s: time limit in seconds. index: a file that takes the place of the clone's index. Raises RecipeError with
    git's own error text where it fails or exceeds the limit, and ConfigError where git is not installed.
    """
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    if (folder / ".git").exists():  # given, not searched for: git then does not look at its owner or at folders above
        root = Path(os.path.abspath(folder))
        settings += [f"--git-dir={root / '.git'}", f"--work-tree={root}"]
    env = {name: value for name, value in os.environ.items() if name not in _OUTER}
    env.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes -oConnectTimeout=30")
    if index is not None:
        env["GIT_INDEX_FILE"] = str(index)
    env |= {
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.resolve().parent),
        "LC_ALL": "C",
    }
    command, output = ["git", *settings, "-C", str(folder), *args], {"capture_output": True, "errors": "replace"}
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, env=env, timeout=limit_s, **output)
    except subprocess.TimeoutExpired:
        raise RecipeError(f"git {args[0]} in {folder}: did not end within {limit_s} s; check network, disk") from None
    except FileNotFoundError:
        raise ConfigError("git is not installed; install it (openEuler: yum install git) and run this again") from None
    if done.returncode:
        raise RecipeError(f"git {args[0]} in {folder}: {_error_text(done.stderr)}")
    return done.stdout.rstrip()


def _error_text(stderr: str) -> str:
    """git's error lines and the indented file names below them, else its last three lines."""
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", stderr) if line.strip()]
    errors = [line.strip() for line in lines if line.startswith(("fatal:", "error:", "remote: error", "ERROR", "\t"))]
    return " ".join(errors or map(str.strip, lines[-3:])) or "no error text"


def trees_of(upstream: Path | None = None, verl_path: Path | None = None) -> Trees:
    """The trees of `--upstream DIR` (the line's repositories that pip does not install) or `--verl-path DIR`.

    vLLM is not among them: pip installs it (on the CPU the wheel of that version). Raises ConfigError for both at once
    and for a folder that lacks a repository.
    """
    if upstream is None:
        folder = None if verl_path is None else Path(verl_path).absolute()
        return Trees() if folder is None else Trees(("--verl-path", str(folder)), (folder,), folder)
    if verl_path is not None:
        raise ConfigError("--upstream and --verl-path: expected one of them, found both; --upstream contains a verl")
    folder, pins = Path(upstream).absolute(), load_pins().line(LINE)
    plain = {name: repository for name, repository in pins.repositories.items() if not repository.by_pip}
    wanted = [f"{name}/{package}" for name, repository in plain.items() for package in repository.packages]
    missing = [name for name in wanted if not (folder / name).is_dir()]
    if missing:
        raise ConfigError(
            f"--upstream {upstream}: expected clones of {', '.join(plain)}, found no {', '.join(missing)}; {FETCH}"
        )
    return Trees(("--upstream", str(folder)), tuple(folder / name for name in plain), folder / "verl")


def for_platform(platform: str, trees: Trees) -> Trees:
    """`trees`, on platform npu_emulated with vllm-ascend's: its compiled part is stood in for, so pip builds none.

    Raises ConfigError where there is no such folder.
    """
    if platform != "npu_emulated" or trees.verl is None:
        return trees
    folder = trees.verl.parent / "vllm-ascend"
    if not (folder / "vllm_ascend").is_dir():
        raise ConfigError(f"platform npu_emulated: expected a clone of vllm-ascend in {folder}, found none; {FETCH}")
    return replace(trees, folders=(*trees.folders, folder))


def commit_of(folder: Path) -> str | None:
    """The commit that is checked out in `folder`; None where it is not the root of a git checkout."""
    return git(folder, "rev-parse", "HEAD") if (folder / ".git").exists() else None


def verl_config_dir(verl_path: Path | None = None) -> Path:
    """verl's trainer/config folder, in the checkout `verl_path` or the installed package; ConfigError without one."""
    if verl_path is not None:
        roots, wanted = [Path(verl_path), Path(verl_path) / "verl"], f"--verl-path {verl_path}"
    else:
        root = installed_root("verl")
        roots, wanted = [root / "verl"] if root else [], "the installed package verl"
    for root in roots:
        if (root / "trainer" / "config" / f"{VERL_CONFIG}.yaml").is_file():
            return (root / "trainer" / "config").resolve()
    raise ConfigError(
        f"{wanted} has no trainer/config/{VERL_CONFIG}.yaml; "
        "run scripts/setup.sh, or give --verl-path with the folder of a verl checkout"
    )


def require_trees(run: RunSpec) -> None:
    """Raise ConfigError where the line of a run does not fit its trees."""
    line, given = run.line, run.trees.option[:1] == ("--upstream",)
    if given and line != LINE:
        raise ConfigError(
            f"--upstream contains line {LINE}, but recipe.line is {line}: give --line {LINE} "
            f"(recipe.line={LINE}), or omit --upstream"
        )
    if line == LINE and run.platform in NO_DEVICE and not given:
        raise ConfigError(
            f"line {LINE} on platform {run.platform} runs the pinned git sources, and no folder was given: "
            f"give --upstream DIR; {FETCH}"
        )


def verl_check(line: str, trees: Trees) -> tuple[bool, str]:
    """(whether the configuration is composed over the verl version that `line` pins, one sentence about it)."""
    package = verl_config_dir(trees.verl).parents[1]
    file, pins = package / "version" / "version", load_pins().line(line)
    found = file.read_text().strip() if file.is_file() else "of an unknown version"
    pin = pins.repositories.get("verl")
    wanted = pin.version if pin else pins.packages["verl"]
    if found == wanted:
        return True, f"composed over verl {found}, {package}"
    if pin:
        wanted += f" ({pin.commit[:12]})"
        todo = f"give the sources of the line with --upstream DIR, or put its verl on PYTHONPATH; {FETCH}"
    else:
        todo = "omit --upstream and --verl-path; bash scripts/setup.sh installs it"
    return False, f"composed over verl {found}, {package}, but line {line} pins {wanted}: {todo}"


def verl_checks(run: RunSpec) -> Iterator[Check]:
    """Check the version of verl: a plan can be made over any, a start needs the line's own."""
    fits, said = verl_check(run.line, run.trees)
    yield Check("verl", True, said if fits else f"a start is refused: {said}", note=not fits)


def require_verl(line: str, trees: Trees) -> None:
    """Raise ConfigError where a run would start over another verl than `line` pins."""
    fits, sentence = verl_check(line, trees)
    if not fits:
        raise ConfigError(sentence)
