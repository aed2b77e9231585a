"""Test scripts/setup.sh and check_env.py: wrong use is refused, a broken environment found; CI runs the set-up."""

import hashlib
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import check_env
import pytest

from tests.upstream.small_upstream import install

ROOT = Path(__file__).resolve().parents[2]


def run_setup(*args: object, **env: object) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env = {**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **{k: str(v) for k, v in env.items()}}
    command = ["bash", str(ROOT / "scripts" / "setup.sh"), *map(str, args)]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env)


def package(site: Path, name: str, version: str, extra: dict[str, str] | None = None) -> None:
    """Install a tiny package in `site`."""
    files = {f"{name}/__init__.py": f"VERSION = {version!r}\n", f"{name}/data.txt": "data\n", **(extra or {})}
    install(site, name, version, files)


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [("--help", 0, "--torch-index URL"), (f"--pins {ROOT / 'scripts'}", 1, "must hold requirements-pypi.txt")],
)
def test_help_and_wrong_options(args, code, words):
    done = run_setup(*args.split(" ", 1))
    assert done.returncode == code and words in done.stdout + done.stderr and "set -euo" not in done.stdout


def test_without_python_311_it_says_how_to_give_one(tmp_path):
    venv = tmp_path / "venv"
    for name in ("python3.11", "python3", "python"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    done = run_setup("--venv", venv, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and "no Python 3.11 found" in done.stderr and "--python EXE" in done.stderr
    assert "Debian" in done.stderr and "openEuler" in done.stderr
    refused = run_setup("--venv", venv, "--python", tmp_path / "python3")
    assert "expected a working Python 3.11" in refused.stderr and not venv.exists()


def test_a_folder_that_is_not_an_environment_is_never_deleted(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = run_setup("--venv", tmp_path, "--python", sys.executable)
    assert done.returncode == 1 and "is not a Python environment" in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_file_that_is_not_the_pinned_one_is_named_and_a_damaged_local_build_is_put_back(tmp_path):
    package(tmp_path / "site", "a_b", "2.0+cpu")
    wheel = tmp_path / "a_b-2.0+cpu-py3-none-any.whl"
    Path(shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path / "site")).rename(wheel)
    pins, venv = tmp_path / "requirements-pypi.txt", tmp_path / "venv"
    (tmp_path / "requirements-pypi-nodeps.txt").write_text("")
    words = ("--venv", venv, "--python", sys.executable, "--pins", tmp_path, "--no-project")
    pins.write_text(f"a_b==2.0 \\\n    --hash=sha256:{'0' * 64}\n")
    refused = run_setup(*words, PIP_FIND_LINKS=tmp_path)
    assert refused.returncode == 1 and "differs from the pinned one" in refused.stderr, refused.stderr
    assert "Mostly this is the network" not in refused.stderr
    pins.write_text(f"a_b==2.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    assert run_setup(*words, PIP_FIND_LINKS=tmp_path).returncode == 0
    (data,) = venv.glob("lib/*/site-packages/a_b/data.txt")
    data.write_text("")
    repaired = run_setup(*words, PIP_FIND_LINKS=tmp_path)
    assert repaired.returncode == 0 and data.read_text() == "data\n" and "making" not in repaired.stdout


def test_check_env_finds_missing_damaged_and_cuda_packages(tmp_path):
    lib = tmp_path / "lib"
    for name in ("good 1.0", "old 1.0", "gone 1.0", "emptied 1.0", "local 2.0+cpu", "nvidia_cublas 12.0"):
        package(lib, *name.split())
    (lib / "gone" / "data.txt").unlink()
    (lib / "emptied" / "data.txt").write_text("")
    (lib / "good" / "data.txt").write_text("an edited file is not a damaged one")
    dists = check_env.distributions_by_name(metadata.distributions(path=[str(lib)]))
    pins = {pin.partition("==")[0]: pin for pin in "good==1.0 old==2.0 gone==1.0 emptied==1.0 local==2.0 no==1".split()}
    found = ["missing old==2.0", "damaged gone==1.0", "damaged emptied==1.0", "missing no==1"]
    assert list(check_env.package_findings(pins, dists)) == found
    assert list(check_env.cuda_findings(dists)) == ["cuda nvidia-cublas==12.0"]
    assert list(check_env.package_findings({"local": "local==2.0+cu1"}, dists)) == ["missing local==2.0+cu1"]
    package(tmp_path / "over", "old", "2.0")
    path = [str(tmp_path / "over"), str(lib)]  # the first is imported
    assert "missing old==2.0" not in check_env.package_findings(
        pins, check_env.distributions_by_name(metadata.distributions(path=path))
    )
