"""One upstream work tree at its pin: in which state it is, making it, moving it, and what is wrong with it.

A tree is made under a hidden name and renamed when commit, tree hash and cleanliness are verified, so a folder with a
repository's own name is always whole. A tree that is there is left alone if it is right, moved to the pin if nothing
can be lost by that, and otherwise refused with what stands in the way.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from verl_patches.cluster.git_tree import OnPercent, fetch, git, has_commit, listed
from verl_patches.cluster.pins import Repository
from verl_patches.patching import prelude_line
from verl_patches.patching.engine import PatchError
from verl_patches.upstream.modified import WORKER_FILE, commit_faults, files_text, merges, tree_changes

# a server's words for "I do not hand out that": another way of asking may be granted
_NOT_GRANTED = re.compile("not our ref|unadvertised object|find remote ref|not allow", re.IGNORECASE)


class TreeError(PatchError):
    """A tree that cannot be used as it is: `found` and what to do (`todo`)."""

    def __init__(self, found: str, todo: str):
        super().__init__(f"{found}; {todo}")
        self.found, self.todo = found, todo


def look(path: Path, pin: Repository) -> str:
    """State of a tree: absent, right or other (a clean tree at another commit); TreeError if it must not be touched."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return "absent"
    if not (path / ".git").exists():
        raise TreeError("files that are no git clone", f"move {path} away")
    head = git(path, "rev-parse", "HEAD")
    changed = tree_changes(path, head, pin.generated)
    if changed:
        raise TreeError(files_text(changed), f"keep them (git -C {path} stash -u, or commit and push a branch), "
                        "or give another --dest")
    wrong = commit_faults(path, pin)
    if not wrong:
        return "right"
    if head == pin.commit or merges(pin):
        raise TreeError("; ".join(wrong), f"move {path} away: it is then made anew")
    if not git(path, "for-each-ref", "--count=1", f"--contains={head}", "refs/remotes"):
        raise TreeError(f"commit {head[:12]}, which is on no remote branch and would be lost",
                        f"push it, or move {path} away, or give another --dest")
    return "other"


def make(path: Path, pin: Repository, source: str, on_percent: OnPercent) -> None:
    """A fresh tree: made beside its place, verified, renamed. What an interrupted run fetched whole is used."""
    partial = path.with_name(f".{path.name}.partial")
    if partial.is_dir() and has_commit(partial, pin.commit):
        try:
            _place(partial, pin, source)
        except PatchError:  # half checked out, or its locks are still there: made anew
            pass
        else:
            partial.rename(path)
            return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    git(partial, "init", "--quiet", "--template=")
    git(partial, "remote", "add", "origin", pin.url)
    _bring(partial, pin, source, on_percent)
    _place(partial, pin, source)
    partial.rename(path)


def move(path: Path, pin: Repository, source: str, on_percent: OnPercent) -> None:
    """A clean tree at another commit: the pin fetched, the prelude line out, the pin checked out.

    Where that fails (an ignored file stands in the way), the prelude line is put back.
    """
    _bring(path, pin, source, on_percent)
    undone = (path / WORKER_FILE).is_file() and prelude_line.undo(path).state == "removed"
    try:
        _place(path, pin, source)
    except PatchError:
        if undone:
            prelude_line.install(path)
        raise


def _bring(folder: Path, pin: Repository, source: str, on_percent: OnPercent) -> None:
    """The pin's objects: by its ref if that is at the pin, else by the bare hash, else (old servers) all history."""
    if has_commit(folder, pin.commit):
        return
    at_ref = pin.ref is not None and pin.commit in listed(source, pin.ref)
    depth = [] if merges(pin) else ["--depth=1"]
    ways = [(depth, pin.ref)] if at_ref else []
    ways += [(depth, pin.commit), ([], pin.ref or "+refs/heads/*:refs/remotes/origin/*")]
    for options, refspec in ways:
        try:
            fetch(folder, source, refspec, options, on_percent)
        except PatchError as error:
            if not _NOT_GRANTED.search(str(error)):
                raise
        if has_commit(folder, pin.commit):
            return
    raise TreeError(f"{source} gives no commit {pin.commit}", "check the pin's url and ref, or the mirror")


def _place(folder: Path, pin: Repository, source: str) -> None:
    """Check out the pin, merge what is to be merged, keep it as a remote ref, verify; PatchError if anything is off."""
    try:
        git(folder, "checkout", "--quiet", "--no-overwrite-ignore", "--detach", pin.commit)
    except PatchError as error:
        raise TreeError(str(error), f"move what stands in the way out of {folder}, or give another --dest") from error
    for pull in merges(pin):
        ref = f"refs/remotes/origin/pull/{pull.number}"
        fetch(folder, source, f"+pull/{pull.number}/head:{ref}")
        head = git(folder, "rev-parse", ref)
        if head != pull.head:
            raise TreeError(f"PR {pull.number}: expected head {pull.head}, found {head}",
                            "somebody pushed to it: review it, then change the pin")
        git(folder, "merge", "--quiet", "--no-edit", head)
    git(folder, "update-ref", f"refs/remotes/origin/pinned-{pin.commit[:12]}", "HEAD")
    wrong = commit_faults(folder, pin) + tree_changes(folder, "HEAD", pin.generated)
    if wrong:
        raise TreeError("; ".join(wrong), "the source or the pin file is wrong: find out which before using it")
