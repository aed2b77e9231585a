"""Provide whole runs of the smoke command, each made once per session and shared by the tests that check it."""

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path

import psutil
import pytest
from loop_runs import ROOT, STREAMS, Finished, add_listeners, smoke_command

from verl_patches.errors import ConfigError
from verl_patches.upstream.checkouts import find_trees


@pytest.fixture(scope="session")
def smoke(tmp_path_factory, warm):
    """Return smoke(*arguments) -> Finished, in which equal arguments share one run.

    With `ok`, a run that fails fails the test with the end of its log. `after` is a run of which this is another start,
    in a copy of its folder. A `cold` run, or one without arguments, starts all its processes from nothing; the workers
    of the others are forks of a warm interpreter (tests/warm), with the same figures except those of memory.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # among all test processes of this session

    def run(*arguments, ok=True, cold=False, after=None):
        key = repr(arguments) + (after.folder.parents[1].name if after else "")
        folder = shared / f"run-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be making this run
            if not (folder / "finished.json").exists():
                if after:
                    shutil.copytree(after.folder.parent, folder / "r", symlinks=True, dirs_exist_ok=True)
                _run(arguments, folder, dict if cold or not arguments else warm)
        result = Finished.read(folder)
        if ok and result.code:
            log = result.log[-3000:] if (result.folder / "driver.log").is_file() else ""
            pytest.fail(f"smoke {' '.join(arguments)} ended with {result.code}:\n{result.output[-2000:]}\n{log}")
        return result

    return run


def _run(arguments: tuple[str, ...], folder: Path, environment) -> None:
    command, env = smoke_command(*arguments, folder=folder)
    listeners, folders, ended = {}, {}, threading.Event()
    with subprocess.Popen(command, cwd=ROOT, env=environment(env), **STREAMS) as launcher:

        def watch():
            while not ended.wait(1):
                with contextlib.suppress(psutil.NoSuchProcess):
                    add_listeners(psutil.Process(launcher.pid), listeners, folders)

        if environment is dict:  # warm workers are not children of the run
            threading.Thread(target=watch).start()
        try:
            output, _ = launcher.communicate(timeout=1200)  # a longer run hangs
        finally:
            ended.set()
            launcher.kill()
    record = {"code": launcher.returncode, "output": output, "listeners": listeners, "folders": folders}
    (folder / "finished.json").write_text(json.dumps(record))


@pytest.fixture(scope="session")
def a3(smoke, pytestconfig):
    """Return smoke for line a3 with the sources of --upstream; skip the test, with the reason, without them."""
    folder = pytestconfig.getoption("--upstream")
    try:
        find_trees(folder)
    except ConfigError as error:
        pytest.skip(str(error))
    return functools.partial(smoke, "--line", "a3", "--upstream", str(folder))


@pytest.fixture(params=["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def line(request):
    """Return a line of upstream versions; a test runs on both lines, one after the other."""
    return request.param


@pytest.fixture
def start(line, request):
    """Return smoke or a3, for a test that runs on both lines."""
    return request.getfixturevalue("smoke" if line == "pypi" else "a3")
