"""`fetch-upstream`: clone the repositories of a line at their pins side by side in one folder, ready to run.

A clone is made in a hidden folder, verified (commit, no changed file) and then renamed, so an interrupted
run leaves no incomplete clone under a repository's name. A clone that exists is verified and never changed, except for
the prelude line in verl. The contract check over all clones comes last.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from verl_patches.boot import install_prelude
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.report import Finding, Report
from verl_patches.shared_files import locked_folder
from verl_patches.upstream.checkouts import git
from verl_patches.upstream.modified import commit_faults, files_text, tree_changes
from verl_patches.upstream.pins import PIN_FILE, Line, Repository

DEFAULT_DEST = PIN_FILE.parents[1] / "upstream"
FETCH_S = 3600  # time limit of one transfer; a stalled one over HTTP ends earlier (http.lowSpeedTime)
# a server's words for a single commit that it does not serve
_NOT_SERVED = re.compile("not our ref|unadvertised object|find remote ref|not allow", re.IGNORECASE)

Log = Callable[[str], None]
Check = Callable[[Path, str], Report]  # the contract check: (folder of clones, line) -> report


class CloneError(RecipeError):
    """A repository that cannot be used: what was found, and what to do (`todo`)."""

    def __init__(self, found: str, todo: str):
        super().__init__(found)
        self.todo = todo


def fetch_upstream(
    line_name: str,
    line: Line,
    dest: Path,
    check: Check,
    mirror: str | None = None,
    only: Sequence[str] = (),
    log: Log = lambda _: None,
) -> Report:
    """Clone the repositories of `line` into `dest`, verify them, insert the prelude line, run `check`.

    mirror: see `sources`. only: names of repositories, default all. log: receives one progress line for each step.
    The findings: each repository with its notes, the prelude line, the check. Raises ConfigError before anything is
    fetched (unknown names, a line without repositories, missing mirrors) and RecipeError where another fetch runs in
    `dest`.
    """
    chosen, dest = _chosen(line_name, line, only), Path(dest).absolute()
    with _locked(dest):
        source = sources({name: pin for name, pin in chosen.items() if _is_absent(dest / name)}, mirror)
        findings: list[Finding] = []
        for name, pin in chosen.items():
            findings += _repository(name, pin, dest / name, source.get(name, ()), log)
        if all(finding.state != "problem" for finding in findings):
            findings += [_prelude(dest / name) for name, pin in chosen.items() if "verl" in pin.packages]
            findings += _checked(line_name, line, dest, check)
    return Report("fetch-upstream", line_name, tuple(findings))


def _chosen(line_name: str, line: Line, only: Sequence[str]) -> dict[str, Repository]:
    if not line.repositories:
        raise ConfigError(f"--line {line_name} has no repositories; bash scripts/setup.sh installs its packages")
    unknown = [name for name in only if name not in line.repositories]
    if unknown:
        raise ConfigError(f"--only {', '.join(unknown)}: expected names among {', '.join(line.repositories)}")
    return {name: pin for name, pin in line.repositories.items() if not only or name in only}


def _locked(dest: Path) -> AbstractContextManager:
    """At most one fetch-upstream for each folder."""
    return locked_folder(
        dest,
        lambda: RecipeError(f"{dest}: another fetch-upstream runs there; wait for it, then run this again"),
        lambda error: ConfigError(f"--dest {dest}: cannot be written ({error.strerror}); give another folder"),
    )


def _is_absent(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))


def sources(needed: Mapping[str, Repository], mirror: str | None) -> dict[str, tuple[str, ...]]:
    """{name: URLs or folder to fetch from, in this order}; nothing is contacted here.

    mirror: None: the pins' URLs. A URL (or host:path): mirror/NAME.git. A folder: NAME.git or NAME in it, bare or not.
    With a mirror no pin's URL is contacted. Raises ConfigError that lists every mirror missing from a folder, and the
    commands that make them.
    """
    if mirror is None:
        return {name: pin.urls for name, pin in needed.items()}
    folder = Path(mirror).absolute()
    if not folder.is_dir():
        if not re.match(r"[A-Za-z][\w+.-]*://|[\w.@-]+:", mirror):
            raise ConfigError(f"--mirror {mirror}: expected a folder of git mirrors or a URL, found neither")
        return {name: (f"{mirror.rstrip('/')}/{name}.git",) for name in needed}
    of_repository = {}
    for name in needed:
        places = [folder / f"{name}.git", folder / name]
        of_repository[name] = tuple(str(p) for p in places if (p / ".git").exists() or (p / "HEAD").is_file())[:1]
    missing = [name for name, place in of_repository.items() if not place]
    if missing:
        commands = [f"git clone --mirror {needed[name].urls[0]} {folder / name}.git" for name in missing]
        raise ConfigError(
            f"--mirror {folder}: found no NAME.git or NAME of {', '.join(missing)}; nothing was fetched. "
            "Make them on a machine with network and copy them here, or give --only:\n  " + "\n  ".join(commands)
        )
    return of_repository


def _repository(name: str, pin: Repository, path: Path, places: Sequence[str], log: Log) -> Iterator[Finding]:
    """Clone `pin` from one of `places` (none: it exists) and verify it; the finding about it, notes about the pin."""
    expected = f"commit {pin.commit}"
    try:
        if places:
            _clone(name, path, pin, places, log)
        else:
            log(f"{name}: verifying {path}")
            _verify(path, pin)
    except (RecipeError, OSError) as error:
        yield Finding(name, "problem", str(path), expected, str(error), _todo(error))
        return
    yield Finding(name, "fine", str(path), expected, f"{'cloned' if places else 'exists'}, no change")
    for pull in pin.pull_requests:
        yield Finding(f"{name} PR {pull.number}", "note", str(path), "", f"not merged: {pull.why}")


def _todo(error: Exception) -> str:
    return error.todo if isinstance(error, CloneError) else "check the network and run this again, or give --mirror"


def _clone(name: str, path: Path, pin: Repository, places: Sequence[str], log: Log) -> None:
    """Clone from the first of `places` that has the pin; CloneError says what each of them answered."""
    failed: dict[str, RecipeError] = {}
    for place in places:
        log(f"{name}: fetching {pin.commit[:12]} from {place}")
        try:
            _clone_from(place, path, pin)
        except RecipeError as error:
            failed[place] = error
        else:
            for other, error in failed.items():
                log(f"{name}: not from {other}: {error}")
            return
    todo = ", or ".join(dict.fromkeys(_todo(error) for error in failed.values()))
    raise CloneError("; ".join(f"from {place}: {error}" for place, error in failed.items()), todo)


def _clone_from(source: str, path: Path, pin: Repository) -> None:
    """Make and verify a clone beside `path`, then rename it; what an interrupted run left is removed first."""
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    git(partial, "init", "--quiet", "--template=")
    git(partial, "remote", "add", "origin", pin.urls[0])
    try:
        _fetch(partial, source, pin.commit, "--depth=1")
    except RecipeError as error:
        if not _NOT_SERVED.search(str(error)):
            raise
        _fetch(partial, source, pin.ref or "+refs/heads/*:refs/remotes/origin/*")
    try:
        git(partial, "checkout", "--quiet", "--detach", pin.commit)
    except RecipeError as error:
        todo = "check urls and ref of the pin, or update the mirror"
        raise CloneError(f"it has no commit {pin.commit} ({error})", todo) from error
    _verify(partial, pin)
    partial.rename(path)


def _fetch(folder: Path, source: str, refspec: str, *options: str) -> None:
    if Path(source).is_dir():  # a shared mirror of another account; every hash is verified, so its owner is no matter
        options += ("--upload-pack=git -c safe.directory=* upload-pack",)
    git(folder, "fetch", "--quiet", "--no-tags", *options, source, refspec, limit_s=FETCH_S)


def _verify(path: Path, pin: Repository) -> None:
    """Raise CloneError where `path` is not a clone at the pin without changes."""
    move, again = f"move {path} away and run this again", "or give another --dest"
    if not (path / ".git").exists():
        raise CloneError("files that are no git clone", f"{move}, {again}")
    if changed := tree_changes(path, "HEAD", pin.generated):
        save = f"keep them (git -C {path} stash -u, or push a branch); run this again"
        raise CloneError(files_text(changed), f"{save}, {again}")
    if wrong := commit_faults(path, pin):
        raise CloneError("; ".join(wrong), f"{move}, {again}")


def _prelude(path: Path) -> Finding:
    try:
        done = install_prelude.insert_line(path)
    except ConfigError as error:
        return Finding("prelude line", "problem", str(path), install_prelude.LINE, str(error), "check the pin of verl")
    return Finding("prelude line", "fine", f"{done.file}:{done.line}", install_prelude.LINE, done.state)


def _checked(line_name: str, line: Line, dest: Path, check: Check) -> list[Finding]:
    """The contract check over `dest` as one finding, and its problems; a note where a repository is missing."""
    missing = [name for name in line.repositories if not (dest / name).is_dir()]
    if missing:
        found = f"not run: no {', '.join(missing)} in {dest}"
        return [Finding("check", "note", str(dest), "every repository of the line", found, "run this without --only")]
    report = check(dest, line_name)
    problems = [finding for finding in report.findings if finding.state == "problem"]
    counts = ", ".join(f"{count} {state}" for state, count in report.as_dict()["counts"].items())
    again = f"python -m verl_patches check --upstream {dest} --line {line_name}" if problems else ""
    return [Finding("check", report.state, str(dest), "no problem", counts, again), *problems]
