"""scripts/setup.sh and check_env.py: what they refuse, and that a broken environment is noticed and put right.

The environments here are made from two tiny wheels that the tests write, so nothing is downloaded.
"""

import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SETUP = ROOT / "scripts" / "setup.sh"


def run_setup(*args: object, **env: object) -> subprocess.CompletedProcess:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    return subprocess.run(
        ["bash", str(SETUP), *map(str, args)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        env={**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **{k: str(v) for k, v in env.items()}},
    )


def load_check_env():
    spec = importlib.util.spec_from_file_location("check_env", ROOT / "scripts" / "check_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_wheel(folder: Path, name: str, version: str, extra: dict[str, str] | None = None) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}/__init__.py": f"VERSION = {version!r}\n",
        f"{name}/data.txt": "data\n",
        **(extra or {}),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},"
        f"{len(text)}\n"
        for path, text in files.items()
    )
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(path, text)


def write_pins(folder: Path, *pins: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "requirements-pypi.txt").write_text("# pins\n" + "\n".join(pins[:-1]) + "\n")
    (folder / "requirements-pypi-nodeps.txt").write_text("\n".join(pins[-1:]) + "\n")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished environment of two tiny packages, and the function that runs setup.sh on it again."""
    folder = tmp_path_factory.mktemp("setup")
    for name, version in (("tinyone", "1.0"), ("tinyone", "1.1"), ("tinytwo", "2.0")):
        write_wheel(folder, name, version)
    write_pins(folder / "pins", "tinyone==1.0", "tinytwo==2.0")

    def again(venv=folder / "venv", **env):
        args = ("--venv", venv, "--pins", folder / "pins", "--no-project", "--python", sys.executable)
        return run_setup(*args, **{"PIP_FIND_LINKS": folder, **env})

    first = again()
    assert first.returncode == 0, first.stdout + first.stderr
    return folder, again


def site(folder: Path) -> Path:
    return next((folder / "venv" / "lib").glob("python3*")) / "site-packages"


def test_help_lists_the_options():
    done = run_setup("--help")
    assert done.returncode == 0
    assert all(option in done.stdout for option in ("--venv DIR", "--python EXE", "--torch-index URL"))
    assert "set -euo" not in done.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--wrong"], "unknown option --wrong"),
        (["--venv"], "--venv needs a value"),
        (["--pins", "/nowhere/at/all"], "no such folder"),
        (["--pins", str(ROOT / "scripts")], "must hold requirements-pypi.txt"),
    ],
)
def test_refuses_wrong_options(args, words):
    done = run_setup(*args)
    assert done.returncode == 1
    assert words in done.stderr


def test_says_what_to_do_without_python_311(tmp_path):
    write_pins(tmp_path / "pins", "tinyone==1.0", "tinytwo==2.0")
    for name in ("python3.11", "python3", "python"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    args = ("--venv", tmp_path / "venv", "--pins", tmp_path / "pins", "--no-project")
    done = run_setup(*args, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1
    assert "no Python 3.11 found" in done.stderr and "--python EXE" in done.stderr
    done = run_setup(*args, "--python", tmp_path / "python3")
    assert "is not a Python 3.11 that runs" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_never_deletes_a_folder_that_is_not_an_environment(tmp_path):
    write_pins(tmp_path / "pins", "tinyone==1.0", "tinytwo==2.0")
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "thesis.txt").write_text("years of work")
    args = ("--venv", tmp_path / "venv", "--pins", tmp_path / "pins", "--no-project", "--python", sys.executable)
    done = run_setup(*args)
    assert done.returncode == 1
    assert "is not a Python environment" in done.stderr
    assert (tmp_path / "venv" / "thesis.txt").read_text() == "years of work"


def test_check_env_sees_what_is_missing_damaged_and_from_cuda(tmp_path):
    check_env = load_check_env()
    for name, version in (("good", "1.0"), ("old", "1.0"), ("gone", "1.0"), ("emptied", "1.0"), ("local", "2.0+cpu")):
        write_wheel(tmp_path, name, version)
    write_wheel(tmp_path, "nvidia_cublas", "12.0")
    lib = tmp_path / "lib"
    for wheel in tmp_path.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(lib)
    (lib / "gone" / "data.txt").unlink()
    (lib / "emptied" / "data.txt").write_text("")
    (lib / "good" / "data.txt").write_text("an edited file is not a damaged one")
    dists = {check_env.canonical(d.metadata["Name"]): d for d in metadata.distributions(path=[str(lib)])}
    pins = {
        p.partition("==")[0]: p for p in ("good==1.0", "old==2.0", "gone==1.0", "emptied==1.0", "local==2.0", "no==1")
    }
    assert list(check_env.package_findings(pins, dists)) == [
        "missing old==2.0",
        "damaged gone==1.0",
        "damaged emptied==1.0",
        "missing no==1",
    ]
    assert list(check_env.cuda_findings(dists)) == ["cuda nvidia-cublas==12.0"]
    assert list(check_env.package_findings({"local": "local==2.0+cu1"}, dists)) == ["missing local==2.0+cu1"]


@pytest.mark.parametrize(("value", "found"), [("None", []), ("'12.8'", ["cuda torch==2.0 is built for CUDA 12.8"])])
def test_check_env_tells_a_cuda_build_of_torch(tmp_path, value, found):
    check_env = load_check_env()
    write_wheel(tmp_path, "torch", "2.0")
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path)
    (tmp_path / "torch" / "version.py").write_text(f"__all__ = ['cuda']\ncuda: Optional[str] = {value}\n")
    dists = {d.metadata["Name"]: d for d in metadata.distributions(path=[str(tmp_path)])}
    assert list(check_env.cuda_findings(dists)) == found


def test_check_env_takes_exact_pins_only(tmp_path):
    check_env = load_check_env()
    file = tmp_path / "pins.txt"
    for wrong in ("numpy>=1", "numpy", "-r other.txt", "a==1\na==2"):
        file.write_text(f"# fine\n{wrong}\n")
        with pytest.raises(ValueError, match=r"pins\.txt:[23]"):
            check_env.read_pins([file])


@pytest.mark.slow
def test_a_second_run_finds_it_ready(made):
    folder, again = made
    stamp = folder / "venv" / ".setup-finished"
    before = stamp.stat().st_mtime_ns
    done = again(PIP_FIND_LINKS="/nowhere")  # so it cannot have installed anything
    assert done.returncode == 0 and "is ready" in done.stdout
    assert stamp.stat().st_mtime_ns == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim", ["tinyone", "tinytwo/data.txt", "tinyone-1.0.dist-info", "tinytwo-2.0.dist-info/RECORD"]
)
def test_deleted_parts_are_put_back(made, victim):
    folder, again = made
    path = site(folder) / victim
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = again()
    assert done.returncode == 0, done.stdout + done.stderr
    assert path.exists() and "repairing" in done.stdout
    assert "is ready" in again().stdout


@pytest.mark.full
def test_half_made_environments_are_finished(made):
    folder, again = made
    (folder / "venv" / ".setup-finished").unlink()  # interrupted while pip ran
    assert "repairing" in again().stdout
    (folder / "venv" / ".setup-started").touch()  # interrupted while the empty environment was made
    (folder / "venv" / "pyvenv.cfg").unlink()
    done = again()
    assert done.returncode == 0 and "making" in done.stdout
    shutil.rmtree(site(folder) / "pip")  # pip itself is gone
    done = again()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is ready" in again().stdout


@pytest.mark.full
def test_changed_pins_are_followed_and_a_package_that_cannot_be_had_is_a_sentence(made):
    folder, again = made
    try:
        write_pins(folder / "pins", "tinyone==1.1", "tinytwo==2.0")
        assert again().returncode == 0
        assert "1.1" in (site(folder) / "tinyone" / "__init__.py").read_text()
        write_pins(folder / "pins", "tinyone==9.9", "tinytwo==2.0")
        done = again()
        assert done.returncode == 1
        assert "run this again" in done.stderr and "tinyone==9.9" in done.stderr
        assert (site(folder) / "tinytwo" / "data.txt").exists()  # what was there is kept
    finally:
        write_pins(folder / "pins", "tinyone==1.0", "tinytwo==2.0")
        assert again().returncode == 0


@pytest.mark.full
def test_the_cpu_build_of_torch_is_taken_where_offered_and_a_cuda_build_is_said(made):
    folder, again = made
    cuda = {"torch/version.py": "cuda: str = '12.8'\n"}
    for version, extra in (("2.0+cpu", {"torch/version.py": "cuda = None\n"}), ("2.0", cuda), ("3.0", cuda)):
        write_wheel(folder, "torch", version, extra)
    try:
        write_pins(folder / "pins", "tinyone==1.0", "torch==2.0", "tinytwo==2.0")
        done = again()
        assert done.returncode == 0 and "CUDA" not in done.stdout, done.stdout + done.stderr
        assert "2.0+cpu" in (site(folder) / "torch" / "__init__.py").read_text()
        (site(folder) / "torch" / "data.txt").unlink()
        assert again().returncode == 0  # a damaged one is put back with the same build
        assert "2.0+cpu" in (site(folder) / "torch" / "__init__.py").read_text()
        write_pins(folder / "pins", "tinyone==1.0", "torch==3.0", "tinytwo==2.0")
        done = again()
        assert done.returncode == 0, done.stdout + done.stderr
        assert "no build named 3.0+cpu is offered" in done.stdout
        assert "torch==3.0 is built for CUDA 12.8" in done.stdout
    finally:
        write_pins(folder / "pins", "tinyone==1.0", "tinytwo==2.0")
        assert again().returncode == 0


@pytest.mark.full
def test_two_at_once_wait_for_each_other(made):
    folder, again = made
    (folder / "venv" / ".setup-finished").unlink()
    lock = folder / "venv.lock"
    with subprocess.Popen(["flock", str(lock), "sleep", "3"]) as holder:
        done = again()
        assert holder.wait() == 0
    assert done.returncode == 0
    assert "another set-up" in done.stdout and "repairing" in done.stdout
