"""Processes on the warm interpreter end, fail and are killed like any other; which modules it may have."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SERVER = Path(__file__).with_name("server.py")
PARENT = "import os; print(os.getppid(), os.environ.get('WHO'), os.getcwd())"


@pytest.fixture
def start(warm):
    """start(code, *arguments, **variables) -> Popen of a process that asks to be warm."""

    def start(code, *arguments, **variables):
        command = [sys.executable, "-X", "warm", "-c", code, *arguments]
        return subprocess.Popen(
            command,
            env=warm({**os.environ, **variables}),
            stdin=subprocess.DEVNULL,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    return start


def of_the_server(process):
    """Whether code ran in a fork; `process` printed PARENT."""
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return int(out.split()[0]) != os.getpid()


def test_code_runs_in_a_fork_with_its_own_environment_folder_and_arguments(warm, tmp_path):
    command = [sys.executable, "-X", "warm", "-W", "ignore", "-c", PARENT + "; import sys; print(sys.argv)", "a", "-c"]
    done = subprocess.run(command, env=warm({"WHO": "me"}), capture_output=True, text=True, cwd=tmp_path, timeout=60)
    said, arguments = done.stdout.splitlines()
    parent, who, folder = said.split(" ", 2)
    assert "server.py" in " ".join(psutil.Process(int(parent)).cmdline()) and (who, folder) == ("me", str(tmp_path))
    assert arguments == "['-c', 'a', '-c']"


def test_a_script_finds_its_folder(warm, tmp_path):
    (tmp_path / "beside.py").write_text("VALUE = 3")
    (tmp_path / "main.py").write_text("import beside, sys\nif __name__ == '__main__': sys.exit(beside.VALUE)")
    command = [sys.executable, "-X", "warm", str(tmp_path / "main.py")]
    assert subprocess.run(command, env=warm(os.environ), timeout=60).returncode == 3


@pytest.mark.parametrize(
    ("code", "ended", "said"),
    [
        ("import sys; sys.exit(5)", 5, ""),
        ("import sys; sys.exit('why')", 1, "why"),
        ("1/0", 1, "ZeroDivisionError"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
        ("import atexit; atexit.register(print, 'last', file=__import__('sys').stderr)", 0, "last"),
    ],
)
def test_it_ends_as_the_code_ends(start, code, ended, said):
    process = start(code)
    _, err = process.communicate(timeout=60)
    assert process.returncode == ended and said in err


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_signal_to_the_process_ends_the_fork(start, number):
    process = start("import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    fork = int(process.stdout.readline())
    assert fork != process.pid
    process.send_signal(number)
    assert process.wait(timeout=30) == -number
    end = time.monotonic() + 10
    while psutil.pid_exists(fork):
        assert time.monotonic() < end, f"{fork} outlived its process"
        time.sleep(0.05)


def test_what_differs_in_what_libraries_read_at_import_starts_from_nothing(start):
    assert of_the_server(start(PARENT))
    assert not of_the_server(start(PARENT, OMP_NUM_THREADS="7"))


def test_without_the_option_it_is_an_ordinary_process(warm):
    done = subprocess.run([sys.executable, "-c", PARENT], env=warm(os.environ), capture_output=True, text=True)
    assert int(done.stdout.split()[0]) == os.getpid()


@pytest.mark.parametrize(
    ("before", "found"),
    [
        ("import ray", "['ray']"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "found 2"),
    ],
)
def test_modules_that_rows_change_and_threads_are_refused(tmp_path, before, found):
    code = f"import sys; sys.path.insert(0, {str(SERVER.parent)!r}); import server; server.AHEAD = []\n{before}\n"
    done = subprocess.run([sys.executable, "-c", code + "server.import_ahead()"], capture_output=True, text=True)
    assert done.returncode == 1 and found in done.stderr
