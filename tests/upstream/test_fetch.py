"""Test scripts/fetch_upstream.sh in a copy of this repository whose line a3 has one small repository more.

The last test fetches the real verl.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.upstream.small_upstream import WORKER, commit, git
from verl_patches.patching.boot.install_prelude import PRELUDE_LINE

pytestmark = pytest.mark.slow  # each starts processes


def fetch(root: Path, *arguments: object, **env: str) -> tuple[int, str]:
    """Run the script and return its exit code and output."""
    path = os.pathsep.join((env.pop("programs", ""), str(Path(sys.executable).parent), os.environ["PATH"]))
    command = ["bash", str(root / "scripts/fetch_upstream.sh"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env, "PATH": path})
    return done.returncode, done.stdout + done.stderr


class Small:
    """Hold a repository of two commits, its bare mirror, and a copy of this project that pins the first commit."""

    def __init__(self, folder: Path, project: Path):
        self.work, self.project, self.dest = folder / "work", project, folder / "dest"
        self.work.mkdir()
        git(self.work, "init", "-q")
        self.first = commit(self.work, {"small/a.py": "a = 1\n"})
        self.second = commit(self.work, {"small/a.py": "a = 2\n"})
        self.bare = folder / "mirrors" / "small.git"
        git(folder, "clone", "-q", "--mirror", str(self.work), str(self.bare))
        self.clone, self.pins = self.dest / "small", (project / "configs/upstream.yaml").read_text()
        self.pin(self.first, "file:///nowhere/small.git", self.bare)

    def pin(self, at: str, *urls: object, ref: str = "null") -> None:
        urls = ", ".join(map(str, urls or [self.bare]))
        entry = f"{{urls: [{urls}], commit: {at}, ref: {ref}, version: '1', packages: [small]}}"
        assert self.pins.count(before := "    repositories:\n      verl:") == 1
        text = self.pins.replace(before, before.replace("verl:", f"small: {entry}\n      verl:"))
        (self.project / "configs/upstream.yaml").write_text(text)

    def fetch(self, *arguments: object, **env: str) -> tuple[int, str]:
        return fetch(self.project, "--dest", self.dest, "--only", "small", *arguments, **env)


@pytest.fixture
def small(tmp_path, repository_copy):
    made = Small(tmp_path, repository_copy)
    yield made
    (repository_copy / "configs/upstream.yaml").write_text(made.pins)


def test_a_fetch_that_was_killed_is_repeated_from_the_second_address_and_then_left_alone(small, tmp_path):
    kills = tmp_path / "programs/git"  # kills the script before it checks the commit out
    kills.parent.mkdir()
    kills.write_text('#!/bin/sh\ncase "$*" in *checkout*) kill -9 $PPID ;; *) PATH=${PATH#*:} exec git "$@" ;; esac\n')
    kills.chmod(0o755)
    code, _ = small.fetch(programs=str(kills.parent))
    assert code == -9 and (small.dest / ".small.partial/.git").is_dir() and not small.clone.exists()
    code, out = small.fetch()
    assert code == 0 and "1 fine" in out and "from file:///nowhere/small.git" in out, out
    assert git(small.clone, "rev-parse", "HEAD") == small.first and os.listdir(small.dest) == ["small"]
    assert git(small.clone, "rev-list", "--count", "HEAD") == "1"  # the clone is shallow
    small.bare.rename(small.bare.with_name("away"))  # an existing clone needs no source
    assert small.fetch()[0] == 0
    code, out = small.fetch("--dest", tmp_path / "other")
    assert code == 1 and f"no address has commit {small.first}" in out


def test_a_changed_clone_another_commit_and_other_files_are_refused_and_not_touched(small):
    assert small.fetch()[0] == 0
    (small.clone / "small/a.py").write_text("a = 3\n")
    code, out = small.fetch()
    assert code == 1 and "small/a.py (modified)" in out and (small.clone / "small/a.py").read_text() == "a = 3\n"
    git(small.clone, "checkout", "-q", "small/a.py")
    small.pin(small.second)
    code, out = small.fetch()
    assert code == 1 and small.second in out and git(small.clone, "rev-parse", "HEAD") == small.first
    (small.dest / "small/.git").rename(small.dest / "git")
    code, out = small.fetch()
    assert code == 2 and "expected a git clone" in out and (small.clone / "small/a.py").exists()


def test_a_mirror_is_a_folder_or_the_beginning_of_a_url_and_the_only_source(small, tmp_path):
    small.pin(small.first, "file:///nowhere/small.git")
    mirrors = small.bare.parent
    for number, mirror in enumerate((mirrors, mirrors.as_uri())):
        code, out = small.fetch("--mirror", mirror, "--dest", tmp_path / str(number))
        assert code == 0 and f"from {mirror}/small.git" in out and "from file:///nowhere" not in out, out
    assert git(tmp_path / "0/small", "remote", "get-url", "origin") == "file:///nowhere/small.git"
    code, out = small.fetch("--mirror", mirrors, "--only", "verl", "--only", "vllm")
    assert code == 2 and not small.dest.exists()
    commands = [line.strip() for line in out.splitlines() if "git clone" in line]
    assert [words.split()[-1] for words in commands] == [f"{mirrors}/{name}.git" for name in ("verl", "vllm")]


@pytest.mark.upstream
def test_the_real_verl_gets_the_prelude_line_once(repository_copy, tmp_path, pytestconfig):
    mirror = Path(pytestconfig.getoption("--upstream")).absolute()
    arguments = ("--line", "a3", "--mirror", mirror, "--dest", tmp_path, "--only", "verl")
    for state in ("installed", "already installed"):
        code, out = fetch(repository_copy, *arguments)
        assert code == 0 and "0 problem" in out and f"prelude line: {state}" in out, out
    assert os.listdir(tmp_path) == ["verl"]
    assert (tmp_path / "verl" / WORKER).read_text().count(PRELUDE_LINE) == 1
    assert git(tmp_path / "verl", "status", "--porcelain") == f"M {WORKER}"
