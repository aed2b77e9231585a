"""Make small git repositories, installed packages and pins of them on this disk."""

import base64
import hashlib
import shutil
import subprocess
from pathlib import Path

from verl_patches.upstream.pins import Line, Repository, load_pins

WORKER = "verl/workers/megatron_workers.py"
WORKER_TEXT = "import logging\n\nimport torch\n\n\nclass ActorRolloutRefWorker:\n    pass\n"


def git(folder: Path, *args: str) -> str:
    identity = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *identity, "-C", str(folder), *args], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(repo: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_text(text)
    git(repo, "add", "-A")
    git(repo, "commit", "-q", "--allow-empty", "-m", "c")
    return git(repo, "rev-parse", "HEAD")


def install(site: Path, name: str, version: str, files: dict[str, str]) -> None:
    """Install a package in a site-packages folder as pip does, with a RECORD of hashes; zipped, it is its wheel."""
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


def make_line(**repositories: Repository) -> Line:
    return load_pins().line("pypi").model_copy(update={"repositories": repositories})
