"""Processes on the warm interpreter end, fail and are killed like any other; which modules it may have."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.ranks import HANG_S

pytestmark = pytest.mark.slow

WARM = [sys.executable, "-X", "warm"]
PARENT = "import os; print(os.getppid(), os.environ.get('WHO'), os.getcwd())"
PIPES = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}


@pytest.fixture
def start(warm):
    """start(code, **variables) -> Popen of a process that asks to be warm."""
    return lambda code, **variables: subprocess.Popen(
        [*WARM, "-c", code], env=warm({**os.environ, **variables}), **PIPES
    )


def in_a_fork(process):
    """Whether code ran in a fork of the server; `process` printed PARENT."""
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 0, err
    return int(out.split()[0]) != os.getpid()


@pytest.mark.slow
def test_code_runs_in_a_fork_with_its_own_environment_folder_and_arguments(warm, tmp_path):
    command = [*WARM, "-W", "ignore", "-c", PARENT + "; import sys; print(sys.argv)", "a", "-c"]
    done = subprocess.run(command, env=warm({**os.environ, "WHO": "me"}), **PIPES, cwd=tmp_path, timeout=HANG_S)
    line, arguments = done.stdout.splitlines()
    parent, who, folder = line.split(" ", 2)
    assert "server.py" in " ".join(psutil.Process(int(parent)).cmdline()) and (who, folder) == ("me", str(tmp_path))
    assert arguments == "['-c', 'a', '-c']"


@pytest.mark.parametrize(("code", "ended", "words"), [
    ("import sys; sys.exit(5)", 5, ""),
    ("1/0", 1, "ZeroDivisionError"),
    ("import os; os.kill(os.getpid(), 9)", -9, ""),
])  # fmt: skip
def test_it_ends_as_the_code_ends(start, code, ended, words):
    process = start(code)
    _, err = process.communicate(timeout=HANG_S)
    assert process.returncode == ended and words in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_the_process_ends_the_fork(start, number):
    process = start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    fork = int(process.stdout.readline())
    assert fork != process.pid
    process.send_signal(number)
    assert process.wait(timeout=HANG_S) == -number
    end = time.monotonic() + HANG_S
    while psutil.pid_exists(fork):
        assert time.monotonic() < end, f"{fork} outlived its process"
        time.sleep(0.05)


def test_only_a_process_with_the_option_and_the_variables_of_the_server_is_its_fork(warm, start):
    assert in_a_fork(start(PARENT))
    assert in_a_fork(start(PARENT, PYTORCH_NPU_ALLOC_CONF="expandable_segments:False", TORCHDYNAMO_DISABLE="0"))
    assert not in_a_fork(start(PARENT, OMP_NUM_THREADS="7"))
    assert not in_a_fork(subprocess.Popen([sys.executable, "-c", PARENT], env=warm(os.environ), **PIPES))
