"""Whole runs of the smoke command, each made once per session and shared by the tests that look at it."""

import functools
import json
import subprocess
import time

import pytest
from loop_runs import ROOT, Finished, smoke_command

from verl_patches.cluster.trees import trees_of
from verl_patches.errors import ConfigError


@pytest.fixture(scope="session")
def smoke(tmp_path_factory):
    """smoke(*arguments) -> Finished; equal arguments share one run. Fails with the log's end if `ok` and it is not."""
    done: dict[tuple, Finished] = {}

    def run(*arguments, ok=True, timeout_s=420):
        if arguments not in done:
            folder, name = tmp_path_factory.mktemp("run"), "r"
            command, env = smoke_command(*arguments, folder=folder, run=name)
            start = time.monotonic()
            found = subprocess.run(command, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                   timeout=timeout_s)
            summary = folder / name / "summary.json"
            done[arguments] = Finished(found.returncode, time.monotonic() - start, found.stdout + found.stderr,
                                       folder / name, json.loads(summary.read_text()) if summary.is_file() else {})
        result = done[arguments]
        if ok and result.code:
            log = result.folder / "driver.log"
            tail = log.read_text(errors="replace")[-3000:] if log.is_file() else ""
            pytest.fail(f"smoke {' '.join(arguments)} ended with {result.code}:\n{result.output[-2000:]}\n{tail}")
        return result

    return run


@pytest.fixture(scope="session")
def a3(smoke, pytestconfig):
    """smoke(*arguments) on line a3 with the sources of --upstream; skips, with the reason, where they are not there."""
    folder = pytestconfig.getoption("--upstream")
    try:
        trees_of(folder)
    except ConfigError as error:
        pytest.skip(str(error))
    return functools.partial(smoke, "--line", "a3", "--upstream", str(folder))
