"""`fetch-upstream`: the repositories of a line at their pins, side by side in one folder, ready to run.

Verified (commit, tree hash, cleanliness), with the prelude line in verl, and checked against the catalogue. Safe to
repeat and to interrupt: what is right is left alone (upstream_tree.py).
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl_patches.cluster.git_tree import git
from verl_patches.cluster.mirrors import sources
from verl_patches.cluster.pins import PIN_FILE, Line, Repository
from verl_patches.cluster.upstream_tree import TreeError, look, make, move
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching import install_prelude
from verl_patches.patching.report import Finding, Report

DEFAULT_DEST = PIN_FILE.parents[1] / "upstream"
CHECK_S = 600

Tell = Callable[[str, "int | None", str], None]  # repository, percent received (None: a line that stays), words


def fetch_upstream(
    line_name: str,
    line: Line,
    dest: Path,
    mirror: str | None = None,
    only: Sequence[str] = (),
    tell: Tell = lambda *_: None,
) -> Report:
    """Bring the repositories of `line` to `dest`, verify them, insert the prelude line, run the contract check.

    mirror: a folder of git mirrors or the beginning of a URL (mirrors.py), then the only source. only: names of
    repositories, default all. Findings: each repository, each pull request that is merged or not and why, the prelude
    line, the check. Raises ConfigError before anything is fetched (unknown names, a line without repositories, mirrors
    that are missing) and RecipeError where another fetch works in `dest`.
    """
    chosen, dest = _chosen(line_name, line, only), Path(dest).absolute()
    with _alone(dest):
        states = {name: _look(dest / name, pin) for name, pin in chosen.items()}
        source = sources({name: chosen[name] for name, state in states.items() if state in ("absent", "other")}, mirror)
        findings: list[Finding] = []
        for name, pin in chosen.items():
            findings += _one(name, pin, dest / name, states[name], source.get(name), tell)
        if all(finding.state != "problem" for finding in findings):
            findings += [_prelude(dest / name) for name, pin in chosen.items() if "verl" in pin.packages]
            findings += _checked(line_name, line, dest)
    return Report("fetch-upstream", line_name, tuple(findings))


def _chosen(line_name: str, line: Line, only: Sequence[str]) -> dict[str, Repository]:
    if not line.repositories:
        raise ConfigError(f"--line {line_name} has no repositories: its packages come from the index, scripts/setup.sh")
    unknown = [name for name in only if name not in line.repositories]
    if unknown:
        raise ConfigError(f"--only {', '.join(unknown)}: expected names among {', '.join(line.repositories)}")
    return {name: pin for name, pin in line.repositories.items() if not only or name in only}


@contextmanager
def _alone(dest: Path) -> Iterator[None]:
    """One fetch-upstream a folder: a second one is told, instead of both writing the same trees."""
    try:
        dest.mkdir(parents=True, exist_ok=True)
        lock = (dest / ".lock").open("w")
    except OSError as error:
        raise ConfigError(f"--dest {dest}: cannot be written ({error.strerror}); give another folder") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RecipeError(f"{dest}: another fetch-upstream works there; wait for it, then run this again") from None
        yield


def _look(path: Path, pin: Repository) -> str | RecipeError:
    try:
        return look(path, pin)
    except RecipeError as error:
        return error


def _one(
    name: str, pin: Repository, path: Path, state: str | RecipeError, source: str | None, tell: Tell
) -> list[Finding]:
    expected = f"commit {pin.commit}" + (f", tree {pin.tree}" if pin.tree else "")
    started = time.monotonic()
    try:
        if isinstance(state, RecipeError):
            raise state
        if state != "right":
            (make if state == "absent" else move)(path, pin, source, lambda percent: tell(name, percent, ""))
        tree = git(path, "rev-parse", "HEAD^{tree}")
    except (RecipeError, ConfigError, OSError) as error:
        again = "run this again, or give a --mirror"
        found, todo = (error.found, error.todo) if isinstance(error, TreeError) else (str(error), again)
        tell(name, None, f"problem: {found}")
        return [Finding(name, "problem", str(path), expected, found, todo)]
    done = {"right": "already right", "absent": "made", "other": "moved to the pin"}[state]
    origin = f" from {source}" if source else ""
    tell(name, None, f"{pin.commit[:12]} {done}{origin}, {time.monotonic() - started:.1f} s")
    return [Finding(name, "fine", str(path), expected, f"{done}, clean, tree {tree}"), *_notes(name, pin, path, tree)]


def _notes(name: str, pin: Repository, path: Path, tree: str) -> Iterator[Finding]:
    if pin.tree is None:
        yield Finding(f"{name} tree", "note", str(path), "a tree hash in the pin file",
                      f"tree not recorded; here it is {tree}", "record it in configs/upstream.yaml")
    for pull in pin.pull_requests:
        said = f"merged, head {pull.head[:12]}" if pull.merge else f"not merged: {pull.why}"
        yield Finding(f"{name} PR {pull.number}", "note", str(path), "", said)


def _prelude(path: Path) -> Finding:
    try:
        done = install_prelude.insert_line(path)
    except ConfigError as error:
        return Finding("prelude line", "problem", str(path), install_prelude.LINE, str(error), "check the pin of verl")
    return Finding("prelude line", "fine", f"{done.file}:{done.line}", install_prelude.LINE, done.state)


def _checked(line_name: str, line: Line, dest: Path) -> list[Finding]:
    """The contract check over `dest`; a line without rows is said, and not called green."""
    again = f"python -m verl_patches check --upstream {dest} --line {line_name}"
    missing = [name for name in line.repositories if not (dest / name).is_dir()]
    if missing:
        found = f"not run: no {', '.join(missing)} in {dest}"
        return [Finding("check", "note", str(dest), "every repository of the line", found, "run this without --only")]
    report = _check_report(line_name, dest)
    if isinstance(report, str):
        return [Finding("check", "problem", str(dest), "a report", report, again)]
    if report["state"] == "empty":
        return [Finding("check", "note", str(dest), "", f"line {line_name} has no rows yet: nothing was checked")]
    problems = [Finding(**{**row, "details": tuple(row["details"])})
                for row in report["rows"] if row["state"] == "problem"]
    words = ", ".join(f"{count} {state}" for state, count in report["counts"].items())
    return [Finding("check", report["state"], str(dest), "no problem", words, again if problems else ""), *problems]


def _check_report(line_name: str, dest: Path) -> Mapping | str:
    """The JSON of `check`, in a process of its own, or why there is none."""
    command = [sys.executable, "-m", "verl_patches", "check", "--upstream", str(dest), "--line", line_name, "--json"]
    path = os.pathsep.join(filter(None, [str(PIN_FILE.parents[1]), os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=CHECK_S,
                              env={**os.environ, "PYTHONPATH": path})
        return json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return f"check did not end within {CHECK_S} s"
    except ValueError:
        return f"check ended with {done.returncode}: {' '.join(done.stderr.split())[-600:]}"
