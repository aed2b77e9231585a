"""scripts/setup.sh and check_env.py: wrong use is refused, a broken environment is found and repaired.

The environments are made from two tiny wheels that the tests write, so nothing is downloaded.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import check_env
import pytest

from tests.upstream.small_upstream import install

ROOT = Path(__file__).resolve().parents[2]


def start_setup(*args: object, **env: object) -> subprocess.Popen:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    env = {**clean, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", **{k: str(v) for k, v in env.items()}}
    command, pipe = ["bash", str(ROOT / "scripts" / "setup.sh"), *map(str, args)], subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env)


def run_setup(*args: object, **env: object) -> subprocess.CompletedProcess:
    with start_setup(*args, **env) as job:
        out, err = job.communicate()
    return subprocess.CompletedProcess(job.args, job.returncode, out, err)


def package(site: Path, name: str, version: str, extra: dict[str, str] | None = None) -> None:
    """A tiny package, installed in `site`."""
    files = {f"{name}/__init__.py": f"VERSION = {version!r}\n", f"{name}/data.txt": "data\n", **(extra or {})}
    install(site, name, version, files)


def write_wheel(folder: Path, name: str, version: str, extra: dict[str, str] | None = None) -> None:
    """The wheel of such a package."""
    with TemporaryDirectory() as site:
        package(Path(site), name, version, extra)
        made = shutil.make_archive(str(folder / name), "zip", site)
    Path(made).rename(folder / f"{name}-{version}-py3-none-any.whl")


class Environment:
    """An environment of two tiny packages in `folder`, and calls of setup.sh for it."""

    def __init__(self, folder: Path):
        self.folder, self.venv = folder, folder / "venv"
        self.pin()

    def pin(self, *pins: str) -> None:
        *main, last = pins or ("tinyone==1.0", "tinytwo==2.0")
        folder = self.folder / "pins"
        folder.mkdir(exist_ok=True)
        (folder / "requirements-pypi.txt").write_text("\n".join(["# pins", *main, ""]))
        (folder / "requirements-pypi-nodeps.txt").write_text(f"{last}\n")

    def setup(self, *args: object, run=run_setup, **env: object):
        options = ("--venv", self.venv, "--pins", self.folder / "pins", "--no-project", *args)
        return run(*options, **{"PIP_FIND_LINKS": self.folder, **env})

    def made(self, **env: object) -> str:
        """The output of a set-up that must succeed."""
        done = self.setup("--python", sys.executable, **env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @property
    def site(self) -> Path:
        return next((self.venv / "lib").glob("python3*")) / "site-packages"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    environment = Environment(tmp_path_factory.mktemp("setup"))
    for name, version in (("tinyone", "1.0"), ("tinyone", "1.1"), ("tinytwo", "2.0")):
        write_wheel(environment.folder, name, version)
    environment.made()
    return environment


@pytest.fixture
def made(finished):
    """The finished environment, which a test may change; finished again after it."""
    yield finished
    finished.pin()
    finished.made()


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ("--help", 0, "--torch-index URL"),
        ("--wrong", 1, "unknown option --wrong"),
        ("--venv", 1, "--venv needs a value"),
        (f"--pins {ROOT / 'scripts'}", 1, "must hold requirements-pypi.txt"),
    ],
)
def test_help_and_wrong_options(args, code, words):
    done = run_setup(*args.split(" ", 1))
    assert done.returncode == code and words in done.stdout + done.stderr and "set -euo" not in done.stdout


def test_without_python_311_it_says_how_to_give_one(tmp_path):
    environment = Environment(tmp_path)
    for name in ("python3.11", "python3", "python"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    done = environment.setup(PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 1 and "no Python 3.11 found" in done.stderr and "--python EXE" in done.stderr
    assert "is not a Python 3.11 that runs" in environment.setup("--python", tmp_path / "python3").stderr
    assert not environment.venv.exists()


def test_a_folder_that_is_not_an_environment_is_never_deleted(tmp_path):
    environment = Environment(tmp_path)
    environment.venv.mkdir()
    (environment.venv / "thesis.txt").write_text("years of work")
    done = environment.setup("--python", sys.executable)
    assert done.returncode == 1 and "is not a Python environment" in done.stderr
    assert (environment.venv / "thesis.txt").read_text() == "years of work"


def test_check_env_finds_missing_damaged_and_cuda_packages(tmp_path):
    lib = tmp_path / "lib"
    for name in ("good 1.0", "old 1.0", "gone 1.0", "emptied 1.0", "local 2.0+cpu", "nvidia_cublas 12.0"):
        package(lib, *name.split())
    (lib / "gone" / "data.txt").unlink()
    (lib / "emptied" / "data.txt").write_text("")
    (lib / "good" / "data.txt").write_text("an edited file is not a damaged one")
    dists = check_env.by_name(metadata.distributions(path=[str(lib)]))
    pins = {pin.partition("==")[0]: pin for pin in "good==1.0 old==2.0 gone==1.0 emptied==1.0 local==2.0 no==1".split()}
    found = ["missing old==2.0", "damaged gone==1.0", "damaged emptied==1.0", "missing no==1"]
    assert list(check_env.package_findings(pins, dists)) == found
    assert list(check_env.cuda_findings(dists)) == ["cuda nvidia-cublas==12.0"]
    assert list(check_env.package_findings({"local": "local==2.0+cu1"}, dists)) == ["missing local==2.0+cu1"]
    package(tmp_path / "over", "old", "2.0")
    path = [str(tmp_path / "over"), str(lib)]  # the first is imported
    assert "missing old==2.0" not in check_env.package_findings(
        pins, check_env.by_name(metadata.distributions(path=path))
    )


@pytest.mark.parametrize(("value", "found"), [("None", []), ("'12.8'", ["cuda torch==2.0 is built for CUDA 12.8"])])
def test_check_env_recognizes_a_cuda_build_of_torch(tmp_path, value, found):
    package(tmp_path, "torch", "2.0", {"torch/version.py": f"cuda: Optional[str] = {value}\n"})
    dists = {d.metadata["Name"]: d for d in metadata.distributions(path=[str(tmp_path)])}
    assert list(check_env.cuda_findings(dists)) == found


@pytest.mark.parametrize("wrong", ["numpy>=1", "numpy", "-r other.txt", "a==1\na==2"])
def test_check_env_takes_exact_pins_only(tmp_path, wrong):
    (tmp_path / "pins.txt").write_text(f"# fine\n{wrong}\n")
    with pytest.raises(ValueError, match=r"pins\.txt:[23]"):
        check_env.read_pins([tmp_path / "pins.txt"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "said"),
    [("tinytwo/data.txt", "damaged tinytwo==2.0"), ("tinyone-1.0.dist-info", "missing tinyone==1.0")],
)
def test_deleted_parts_are_restored_and_nothing_else_is_installed(made, victim, said):
    path, stamp = made.site / victim, made.venv / ".setup-finished"
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert re.search(f"repairing .*: {said}", made.made()) and path.exists()
    before = stamp.stat().st_mtime_ns
    assert "is ready" in made.made(PIP_FIND_LINKS="/nowhere") and stamp.stat().st_mtime_ns == before


@pytest.mark.slow
def test_interrupted_set_ups_are_finished(made):
    (made.venv / ".setup-finished").unlink()  # interrupted while pip ran
    assert "repairing" in made.made()
    (made.venv / ".setup-started").touch()  # interrupted while the empty environment was made
    (made.venv / "pyvenv.cfg").unlink()
    assert "making" in made.made()
    shutil.rmtree(made.site / "pip")
    made.made()
    assert "is ready" in made.made()


@pytest.mark.slow
def test_changed_pins_are_installed_and_an_unavailable_package_is_named(made):
    made.pin("tinyone==1.1", "tinytwo==2.0")
    made.made()
    assert "1.1" in (made.site / "tinyone" / "__init__.py").read_text()
    made.pin("tinyone==9.9", "tinytwo==2.0")
    done = made.setup("--python", sys.executable)
    assert done.returncode == 1 and "run this again" in done.stderr and "tinyone==9.9" in done.stderr
    assert (made.site / "tinytwo" / "data.txt").exists()  # installed packages stay


@pytest.mark.slow
def test_the_cpu_build_of_torch_is_preferred_and_a_cuda_build_is_reported(made):
    cuda = {"torch/version.py": "cuda: str = '12.8'\n"}
    for version, extra in (("2.0+cpu", {"torch/version.py": "cuda = None\n"}), ("2.0", cuda), ("3.0", cuda)):
        write_wheel(made.folder, "torch", version, extra)
    made.pin("tinyone==1.0", "torch==2.0", "tinytwo==2.0")
    assert "CUDA" not in made.made() and "2.0+cpu" in (made.site / "torch" / "__init__.py").read_text()
    (made.site / "torch" / "data.txt").unlink()
    made.made()  # a damaged one is replaced by the same build
    assert "2.0+cpu" in (made.site / "torch" / "__init__.py").read_text()
    made.pin("tinyone==1.0", "torch==3.0", "tinytwo==2.0")
    out = made.made()
    assert "no build named 3.0+cpu is offered" in out and "torch==3.0 is built for CUDA 12.8" in out


@pytest.mark.slow
def test_a_set_up_waits_for_another_one(made):
    (made.venv / ".setup-finished").unlink()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    lock = ["flock", str(made.folder / "venv.lock"), "sh", "-c", "echo held; read line"]
    with subprocess.Popen(lock, **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        with made.setup("--python", sys.executable, run=start_setup) as job:
            assert "another set-up" in job.stdout.readline()
            holder.stdin.close()
            assert "repairing" in job.stdout.read()
    assert job.returncode == 0
