"""One upstream work tree at its pin: in which state it is, making it, moving it, and what is wrong with it.

A tree is made under a hidden name and renamed when commit, tree hash and cleanliness are verified, so a folder with a
repository's own name is always whole. A tree that is there is left alone if it is right, moved to the pin if nothing
can be lost by that, and otherwise refused with what stands in the way.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

from verl_patches.cluster.git_tree import OnPercent, fetch, git, has_commit, listed, succeeds
from verl_patches.cluster.pins import PullRequest, Repository
from verl_patches.patching import prelude_line
from verl_patches.patching.engine import PatchError

WORKER_FILE = Path("verl") / prelude_line.INSIDE
_SHOWN = 10  # of a long list of changed files
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
    changed, head = dirt(path), git(path, "rev-parse", "HEAD")
    if changed:
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        raise TreeError(f"changed files: {', '.join(changed[:_SHOWN])}{more}",
                        f"keep them (git -C {path} stash -u, or commit and push a branch), or give another --dest")
    wrong = faults(path, pin)
    if not wrong:
        return "right"
    if head == pin.commit or merges(pin):
        raise TreeError("; ".join(wrong), f"move {path} away: it is then made anew")
    if not git(path, "for-each-ref", "--count=1", f"--contains={head}", "refs/remotes"):
        raise TreeError(f"commit {head[:12]}, which is on no remote branch and would be lost",
                        f"push it, or move {path} away, or give another --dest")
    return "other"


def dirt(path: Path) -> list[str]:
    """Changed and untracked files of a work tree, as git status says them; our prelude line alone is no change."""
    lines = git(path, "status", "--porcelain=v1", "-z", "--untracked-files=normal").split("\0")
    changed = [(line[:2], line[3:]) for line in lines if line]
    ours = (" M", str(WORKER_FILE))
    return [f"{file} ({state.strip()})" for state, file in changed if (state, file) != ours or not _only_prelude(path)]


def faults(folder: Path, pin: Repository) -> list[str]:
    """In what the checked-out commit differs from the pin; empty if it is the pin."""
    head, tree = git(folder, "rev-parse", "HEAD", "HEAD^{tree}").split()
    found = []
    if merges(pin):
        for commit in (pin.commit, *(pull.head for pull in merges(pin))):
            if not succeeds(folder, "merge-base", "--is-ancestor", commit, head):
                found.append(f"expected {commit} to be merged, found {head} without it")
    elif head != pin.commit:
        found.append(f"expected commit {pin.commit}, found {head}")
    if pin.tree and tree != pin.tree:
        found.append(f"expected tree {pin.tree}, found {tree}")
    return found


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


def merges(pin: Repository) -> list[PullRequest]:
    """The pull requests that the pin wants merged."""
    return [pull for pull in pin.pull_requests if pull.merge]


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
    wrong = faults(folder, pin) + dirt(folder)
    if wrong:
        raise TreeError("; ".join(wrong), "the source or the pin file is wrong: find out which before using it")


def _only_prelude(path: Path) -> bool:
    """Whether verl's worker file is its committed self plus our line: the line taken out gives the committed hash."""
    file = path / WORKER_FILE
    if not file.is_file():
        return False
    lines = file.read_bytes().splitlines(keepends=True)
    ours = [n for n, line in enumerate(lines) if line.strip() == prelude_line.LINE.encode()]
    data = b"".join(line for n, line in enumerate(lines) if n not in ours[:1])
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    return blob == git(path, "rev-parse", f"HEAD:{WORKER_FILE}")
