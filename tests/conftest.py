"""Define options and fixtures for all tests.

Options
    --full            also run the tests marked `slow`, as each submission does
    --nightly         run everything, the tests marked `nightly` too
    --upstream DIR    folder with git clones of upstream (verl, Megatron-LM, ...), for tests marked `upstream`
`pytest --fixtures` lists the fixtures below. Each test starts with the random generators of Python, torch and numpy
seeded with TEST_SEED (default 0).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import hypothesis
import psutil  # noqa: F401  before Ray, which puts its own psutil 5.9 first on sys.path
import pytest

from tests.ranks import HANG_S, Ranks

ROOT = Path(__file__).resolve().parent.parent
TIERS = {"slow": ("--full", "--nightly"), "nightly": ("--nightly",)}  # marker -> options that run it
WARM_FOLDER = ROOT / "tests" / "warm"

SAFE_ENV = {
    "_TYPER_FORCE_DISABLE_TERMINAL": "1",  # variables of CI would switch on colours in errors
    "HF_HUB_OFFLINE": "1",  # tests must not download
    "MPLBACKEND": "Agg",
    "OMP_NUM_THREADS": "1",  # test processes share two cores
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}


def emulated_npu() -> str:
    """Return VERL_PATCHES for platform npu_emulated; with a torch other than line pypi's, drift only warns."""
    from verl_patches.upstream.pins import load_pins, same_version

    reviewed = same_version(load_pins().line("pypi").packages["torch"], metadata.version("torch"))
    return "line=a3,platform=npu_emulated" + ("" if reviewed else ",drift=warn")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("verl_patches")
    group.addoption("--full", action="store_true", help="also run the tests marked slow, as each submission does")
    group.addoption("--nightly", action="store_true", help="run all tests, those marked nightly too")
    group.addoption("--upstream", metavar="DIR", type=Path, help="folder with git clones of the upstream sources")


def pytest_configure(config: pytest.Config) -> None:
    for name, value in SAFE_ENV.items():  # before any test module imports torch
        os.environ.setdefault(name, value)
    slow = hypothesis.HealthCheck.too_slow  # slowness is not a failure
    hypothesis.settings.register_profile("busy machine", deadline=None, suppress_health_check=[slow])
    hypothesis.settings.load_profile("busy machine")
    os.environ.pop("VERL_PATCHES", None)  # the switches of the shell must not change tests
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # some images set it, and each process would compile all sources
    # a shell's background job ignores SIGINT, and its children could not handle it
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = config.getoption("--upstream")
    if folder is not None and not folder.is_dir():
        raise pytest.UsageError(f"--upstream {folder}: not a folder; expected one that holds git clones, e.g. DIR/verl")


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--nightly"):
        return "tests: all"
    if config.getoption("--full"):
        return "tests: quick and slow ones; --nightly runs all"
    return "tests: quick ones; --full runs slow ones too, --nightly all"


def names_tests(config: pytest.Config) -> bool:
    """Return whether the command line names some folders, files or tests rather than the whole suite."""
    return any(Path(argument).resolve() not in (ROOT, ROOT / "tests") for argument in config.args)


@pytest.hookimpl(tryfirst=True)  # before -m is evaluated, so that `-m "not slow"` leaves out the nightly tests too
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen_tests, run, left_out = names_tests(config), [], []
    for item in items:
        if item.get_closest_marker("upstream") and config.getoption("--upstream") is None:
            item.add_marker(pytest.mark.skip(reason="needs upstream sources: runs with --upstream DIR"))
        tier = next((name for name in ("nightly", "slow") if item.get_closest_marker(name)), None)
        if tier == "nightly":
            item.add_marker("slow")
        if tier is None or any(config.getoption(option) for option in TIERS[tier]):
            run.append(item)
        elif chosen_tests:
            run.append(item)
            item.add_marker(pytest.mark.skip(reason=f"{tier} test: runs with {' or '.join(TIERS[tier])}"))
        else:
            left_out.append(item)
    config.hook.pytest_deselected(items=left_out)
    # Run the longest folders first; scripts/test.sh keeps this order.
    items[:] = sorted(run, key=lambda item: item.path.parent.name not in ("loop", "supervise"))


@pytest.fixture(autouse=True)
def _unset_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make output as wide as in a pipe, whatever COLUMNS a terminal or library has set."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _seed_generators() -> None:
    """Seed the generators, so that random numbers do not depend on which tests share a process under `-n 2`."""
    seed = int(os.environ.get("TEST_SEED", "0"))
    for name, start in (("random", "seed"), ("torch", "manual_seed"), ("numpy.random", "seed")):
        if (module := sys.modules.get(name)) is not None:
            getattr(module, start)(seed)


@pytest.fixture(scope="module")
def repository_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy this repository without its tests and return the folder."""
    folder, ignore = tmp_path_factory.mktemp("repository"), shutil.ignore_patterns("__pycache__")
    for name in ("verl_patches", "configs", "scripts", "docs", "data", "README.md", "README_zh.md"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    return folder


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[str]:
    """Yield a folder for RAY_TMPDIR: paths of Ray's sockets must have less than 108 characters, pytest's are longer."""
    with tempfile.TemporaryDirectory(prefix="r-", ignore_cleanup_errors=True) as folder:
        yield folder


@pytest.fixture(scope="session")
def warm() -> Iterator[Callable[[Mapping[str, str]], dict[str, str]]]:
    """Yield `warm(env)`, which adds the variables that make processes forks of one interpreter with imports done.

    They apply to Ray's workers and to `python -X warm ...`. Tests of how a process starts must not use this.
    """
    with tempfile.TemporaryDirectory(prefix="w-") as folder:
        command, path = [sys.executable, str(WARM_FOLDER / "server.py")], str(Path(folder, "s"))
        env = {**os.environ, **SAFE_ENV, "TORCHDYNAMO_DISABLE": "1"}
        with subprocess.Popen([*command, path], env=env, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as server:
            assert server.stdout is not None and server.stdout.readline() == b"ready\n"

            def add(env: Mapping[str, str]) -> dict[str, str]:
                paths = os.pathsep.join(filter(None, [str(WARM_FOLDER), env.get("PYTHONPATH")]))
                return {**SAFE_ENV, "TORCHDYNAMO_DISABLE": "1", **env, "WARM_PYTHON": path, "PYTHONPATH": paths}

            yield add
            server.kill()


def python_with_prelude(folder: Path) -> Path:
    """Make an environment in `folder` on top of this one, install the prelude's .pth there, return its interpreter."""
    from verl_patches.patching.boot import install_prelude

    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = next((folder / "venv" / "lib").glob("python*/site-packages"))
    (site / "base.pth").write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    (site / install_prelude.PTH_NAME).write_text(install_prelude.PTH_TEXT)
    return folder / "venv" / "bin" / "python"


@dataclass(frozen=True)
class Finished:
    """Hold the exit code (negative: a signal), stdout and stderr of a process that has ended."""

    rc: int
    out: str
    err: str

    def check(self) -> Finished:
        """Return self if the process exited 0, else fail the test with the end of its output."""
        assert self.rc == 0, f"exit {self.rc}\n--- stdout\n{self.out[-4000:]}\n--- stderr\n{self.err[-8000:]}"
        return self


def _environment(patches: str | None, env: Mapping[str, str] | None) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != "VERL_PATCHES"} | SAFE_ENV | (env or {})
    if patches is not None:
        variables["VERL_PATCHES"] = patches
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), variables.get("PYTHONPATH")]))}


def _run(flags: Sequence[str], env: Mapping[str, str], code: str, arguments: Sequence[str]) -> Finished:
    command, pipe = [sys.executable, *flags, "-c", code, *arguments], subprocess.PIPE
    streams = {"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, **streams, env=env, start_new_session=True)
    try:
        out, err = process.communicate(timeout=HANG_S)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)  # the session holds only processes of this test
        out, err = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            pytest.fail(f"killed after {HANG_S} s\n--- stdout\n{out[-4000:]}\n--- stderr\n{err[-8000:]}")
        raise
    return Finished(process.returncode, out, err)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., Finished]:
    """Return a function that runs code in a fresh interpreter: `run_python("print(1)", env={...}).check().out`.

    Parameters: the code, then its sys.argv[1:] as strings; keywords: patches (the VERL_PATCHES variable, such as
    "line=pypi,platform=cpu"; None leaves it unset), env (more variables). The repository is on its path. After HANG_S
    its whole process group is killed and the test fails. Returns `Finished` (rc, out, err); `.check()` demands exit 0.
    """
    return lambda code, *arguments, patches=None, env=None: _run((), _environment(patches, env), code, arguments)


@pytest.fixture(scope="session")
def run_warm(warm: Callable[[Mapping[str, str]], dict[str, str]]) -> Callable[..., Finished]:
    """Return `run_python` for a fork of the warm interpreter."""
    return lambda code, *arguments, patches=None, env=None: _run(
        ("-X", "warm"), warm(_environment(patches, env)), code, arguments
    )


@pytest.fixture(scope="session")
def run_ranks(warm: Callable[[Mapping[str, str]], dict[str, str]]) -> Callable[..., list]:
    """Return a function that runs another on gloo ranks: `run_ranks("tests.model.parity_job:bf16_job", folder)`.

    It returns the list of what each rank returned. Parameters: "module:function" and its arguments; keywords: size (1),
    patches (the VERL_PATCHES variable; with it the ranks import the prelude first), env (more variables), fresh (no
    warm interpreter: for tests of how a process starts), and those of `Ranks` in tests/ranks.py. Raises RankError.
    """

    def run(function: str, *arguments: Any, size: int = 1, patches=None, env=None, fresh=False, **options: Any) -> list:
        environment, flags = _environment(patches, env), ()
        if not fresh:
            environment, flags = warm(environment), ("-X", "warm")
        options = {"prelude": patches is not None, "flags": flags, **options}
        with Ranks(size, environment, **options) as ranks:
            return ranks.run(function, *arguments)

    return run


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Yield four gloo ranks."""
    with Ranks(4) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def ranks8() -> Iterator[Ranks]:
    """Yield eight gloo ranks."""
    with Ranks(8) as ranks:
        yield ranks


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a tiny DeepSeek-V3 of seed 0 in Hugging Face's format and return its folder."""
    from verl_patches.model.tiny import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def a3_sources(pytestconfig: pytest.Config) -> Callable[..., list[Path]]:
    """Return `a3_sources("verl", "Megatron-LM")`, which finds checkouts below --upstream, in the order of PYTHONPATH.

    Without names it finds all four of a training worker. It skips the test, with the reason, if one is missing.
    """

    def find(*names: str) -> list[Path]:
        folder = pytestconfig.getoption("--upstream")
        names = names or ("verl", "Megatron-LM", "MindSpeed", "MindSpeed-LLM")
        packages = {name: "megatron" if name == "Megatron-LM" else name.lower().replace("-", "_") for name in names}
        missing = [name for name in names if folder is None or not (folder / name / packages[name]).is_dir()]
        if missing:
            pytest.skip(f"--upstream {folder} holds no checkouts of {', '.join(missing)}: fetch_upstream.sh makes them")
        return [folder.resolve() / name for name in names]

    return find


@pytest.fixture(scope="session")
def run_emulated(run_ranks: Callable[..., list], a3_sources: Callable[..., list[Path]]) -> Callable[..., list]:
    """Return `run_ranks` for platform npu_emulated with vllm-ascend's engines in the ranks; trees: checkouts to use."""

    def run(function: str, *arguments: Any, env=(), trees=("vllm-ascend",), **options: Any) -> list:
        engine = {"VLLM_ENABLE_FIX_ROUTE": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
        engine |= {"VLLM_USE_V1": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        env = {**engine, "PYTHONPATH": os.pathsep.join(map(str, a3_sources(*trees))), **dict(env)}
        return run_ranks(function, *arguments, **{"patches": emulated_npu(), "env": env, "fresh": True, **options})

    return run


@pytest.fixture(scope="session")
def upstream_text(pytestconfig: pytest.Config) -> Callable[[str, str, str], str]:
    """Return `upstream_text("volcengine/verl", commit, "verl/protocol.py")`, which reads a file of upstream.

    It skips the test, with the reason, if --upstream holds no clone of that name with the commit.
    """
    folder = pytestconfig.getoption("--upstream")

    def read(repository: str, commit: str, path: str) -> str:
        clone = Path(folder or "", repository.rpartition("/")[2])
        shown = subprocess.run(["git", "-C", clone, "show", f"{commit}:{path}"], capture_output=True)
        if shown.returncode:
            pytest.skip(f"{clone}: {shown.stderr.decode()}")
        return shown.stdout.decode()

    return read
