"""git for fetch-upstream: no hooks, no prompts, no personal setting that would change a tree, and an end to silence.

Repositories are made without templates and never take part in submodules or housekeeping; what a person has configured
about the network (proxy, certificates, insteadOf) stays in force.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from verl_patches.errors import ConfigError
from verl_patches.patching.engine import PatchError
from verl_patches.processes import die_with_parent

QUICK_S = 120  # a local command, or one question to a server
SILENCE_S = 180  # a transfer reports its progress every second; silent for this long, it is stuck

_SETTINGS = (
    "core.hooksPath=/dev/null", "core.autocrlf=false", "core.attributesFile=/dev/null", "core.excludesFile=/dev/null",
    "core.fsmonitor=false",
    "core.quotePath=false", "gc.auto=0", "maintenance.auto=false", "submodule.recurse=false", "status.renames=false",
    "commit.gpgSign=false", "advice.detachedHead=false", "user.name=fetch-upstream", "user.email=fetch@localhost",
)
# what `git rev-parse --local-env-vars` lists and an outer git (a hook, a rebase) may have left behind
_OUTER = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_ALTERNATE_OBJECT_DIRECTORIES",
          "GIT_COMMON_DIR", "GIT_NAMESPACE", "GIT_PREFIX", "GIT_SHALLOW_FILE", "GIT_GRAFT_FILE")
OnPercent = Callable[[int], None]  # percent of the objects received
_PERCENT = re.compile(rb"Receiving objects:\s+(\d+)%")


def git(folder: Path | None, *args: str) -> str:
    """What a short git command in `folder` prints; PatchError with git's words if it fails, ConfigError without git."""
    command = _command(folder, *args)
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
                              env=_environment(folder), timeout=QUICK_S, preexec_fn=die_with_parent)
    except subprocess.TimeoutExpired:
        raise PatchError(f"git {args[0]}: no answer within {QUICK_S} s; is the network or the disk stuck?") from None
    except FileNotFoundError:
        raise ConfigError("git is not installed; install it (openEuler: yum install git) and run this again") from None
    if done.returncode:
        raise PatchError(f"git {args[0]}: {_last_words(done.stderr)}")
    return done.stdout.rstrip()


def succeeds(folder: Path | None, *args: str) -> bool:
    """Whether a short git command exits 0."""
    try:
        git(folder, *args)
    except PatchError:
        return False
    return True


def has_commit(folder: Path, commit: str) -> bool:
    """Whether `folder` (a work tree's root, or a bare repository) holds a commit; never looks into folders above it."""
    git_dir = folder / ".git" if (folder / ".git").exists() else folder
    return succeeds(None, f"--git-dir={git_dir}", "cat-file", "-e", f"{commit}^{{commit}}")


def listed(source: str, *refs: str) -> set[str]:
    """Hashes that `source` gives for these refs, tags peeled too; PatchError where it cannot be reached."""
    patterns = [text for ref in refs for text in (ref, f"{ref}^{{}}")]
    return {line.split()[0] for line in git(None, "ls-remote", *_upload_pack(source), source, *patterns).splitlines()}


def fetch(
    folder: Path, source: str, refspec: str, options: Sequence[str] = (), on_percent: OnPercent = lambda _: None
) -> None:
    """`git fetch` one refspec into `folder`; PatchError with git's words if it fails or is silent for SILENCE_S."""
    command = _command(folder, "fetch", "--progress", "--no-tags", *options, *_upload_pack(source), source, refspec)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               env=_environment(folder), start_new_session=True, preexec_fn=die_with_parent)
    words = b""
    try:
        while select.select([process.stderr], [], [], SILENCE_S)[0]:
            data = os.read(process.stderr.fileno(), 65536)
            if not data:
                break
            words = (words + data)[-8000:]
            percents = _PERCENT.findall(data)
            if percents:
                on_percent(int(percents[-1]))
        else:
            raise PatchError(f"git fetch {source}: silent for {SILENCE_S} s; is the network stuck? Run this again")
        if process.wait(QUICK_S):
            raise PatchError(f"git fetch {source}: {_last_words(words.decode(errors='replace'))}")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its own session: git and its helpers, nothing else
            process.wait()
        process.stderr.close()


def _upload_pack(source: str) -> list[str]:
    """A mirror folder may belong to another account (a shared disk): git serves it, since every hash is verified."""
    return ["--upload-pack=git -c safe.directory=* upload-pack"] if Path(source).is_dir() else []


def _command(folder: Path | None, *args: str) -> list[str]:
    settings = [word for setting in _SETTINGS for word in ("-c", setting)]
    if folder and (folder / ".git").exists():  # named, not looked for: git then asks neither who owns it, nor above it
        own = Path(os.path.abspath(folder))
        settings += [f"--git-dir={own / '.git'}", f"--work-tree={own}"]
    return ["git", *settings, *(["-C", str(folder)] if folder else []), *args]


def _environment(folder: Path | None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in _OUTER}
    env.setdefault("GIT_SSH_COMMAND", "ssh -oBatchMode=yes -oConnectTimeout=30")
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_ALLOW_PROTOCOL": "file:git:http:https:ssh", "GIT_OPTIONAL_LOCKS": "0",
            "GIT_NO_REPLACE_OBJECTS": "1", "LC_ALL": "C"}
    if folder:  # a folder that is no repository must not be taken for a part of one above it
        env["GIT_CEILING_DIRECTORIES"] = str(folder.resolve().parent)
    return env


def _last_words(text: str) -> str:
    """git's error lines and the files listed (indented) below them, or else the last three lines."""
    lines = [line.rstrip() for line in re.split(r"[\r\n]+", text) if line.strip()]
    said = [line.strip() for line in lines if line.startswith(("fatal:", "error:", "remote: error", "ERROR", "\t"))]
    return " ".join(said or map(str.strip, lines[-3:])) or "failed without a word"
