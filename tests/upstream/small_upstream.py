"""A small upstream repository on this disk, and one call of fetch-upstream."""

import base64
import hashlib
import shutil
import subprocess
from pathlib import Path

from verl_patches.patching.report import Finding, Report
from verl_patches.upstream.fetch import fetch_upstream
from verl_patches.upstream.pins import Repository, load_pins

WORKER = "verl/workers/megatron_workers.py"
WORKER_TEXT = "import logging\n\nimport torch\n\n\nclass ActorRolloutRefWorker:\n    pass\n"
NOWHERE = "file:///nowhere/owner/verl.git"  # no such folder


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, "-C", str(folder), *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(repo: Path, files: dict[str, str], *, parent: str | None = None) -> str:
    if parent:
        git(repo, "checkout", "-q", "--detach", parent)
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "-m", "c")
    return git(repo, "rev-parse", "HEAD")


class Upstream:
    """`owner/verl.git`: branch main with two commits, pull request 7 based on the first one."""

    def __init__(self, folder: Path):
        work = folder / "work"
        work.mkdir()
        git(work, "init", "-q")
        self.first = commit(work, {WORKER: WORKER_TEXT, "verl/a.py": "a = 1\n", ".gitignore": "*.pyc\n"})
        self.second = commit(work, {"verl/a.py": "a = 2\n"})
        self.pull = commit(work, {"verl/b.py": "b = 1\n"}, parent=self.first)
        git(work, "checkout", "-q", "main")
        self.bare = folder / "owner" / "verl.git"
        self.bare.parent.mkdir()
        git(folder, "clone", "-q", "--mirror", str(work), str(self.bare))
        git(self.bare, "fetch", "-q", str(work), f"{self.pull}:refs/pull/7/head")

    def pin(self, at: str, **more) -> Repository:
        facts = {"urls": [str(self.bare)], "commit": at, "packages": ["verl"], "version": "1", **more}
        return Repository.model_validate(facts)


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """A package in a site-packages folder as pip leaves it, with a RECORD of hashes; zipped, it is its wheel."""
    rows, info = [], site / f"{name}-{version}.dist-info"
    for old in site.glob(f"{name}-*.dist-info"):
        shutil.rmtree(old)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    for path, text in {**files, f"{info.name}/METADATA": metadata, f"{info.name}/WHEEL": wheel}.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(text)}")
    (info / "RECORD").write_text("\n".join([*rows, f"{info.name}/RECORD,,"]) + "\n")


def line_of(**repositories: Repository):
    return load_pins().line("pypi").model_copy(update={"repositories": repositories})


def all_fine(folder: Path, line: str) -> Report:
    """A contract check that finds no problem."""
    return Report("check", line, (Finding("a.row", "fine"),))


def run(dest, pin, mirror=None, check=all_fine, **more):
    report = fetch_upstream("test", line_of(verl=pin), dest, check, mirror, **more)
    return report, {finding.name: finding for finding in report.findings}
