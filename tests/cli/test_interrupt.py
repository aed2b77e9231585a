"""Test Ctrl-C of commands that wait: it reaches the whole process group, is named as such, and leaves no process."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from tests.ranks import HANG_S
from verl_patches.errors import interruption_text
from verl_patches.run.environment import REPOSITORY


def heed_hang_ups():
    """Heed hang-ups as in a terminal; under nohup, in which these tests may run, they are ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def start_command(tmp_path):
    """Return start_command(*words), which starts a command in its own process group, both streams in one file."""
    made = []

    def start(*words):
        command = [sys.executable, "-m", "verl_patches", *words]
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        with (tmp_path / "output").open("w") as output:
            streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            streams |= {"start_new_session": True, "preexec_fn": heed_hang_ups}
            made.append(subprocess.Popen(command, cwd=REPOSITORY, env=env, **streams))
        return made[-1]

    yield start
    for process in made:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


SILENT_SERVER = socket.create_server(("127.0.0.1", 0))
ADDRESS = f"127.0.0.1:{SILENT_SERVER.getsockname()[1]}"
# `doctor` waits for this address, which never answers
DOCTOR = ("doctor", "deepseekv3_tiny_cpu", f"recipe.ray_address={ADDRESS}", "trainer.nnodes=1")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_a_user_ended_is_said_to_be_ended_by_the_user(start_command, tmp_path, number):
    output = tmp_path / "output"
    process = start_command(*DOCTOR)
    while not psutil.Process(process.pid).children():  # until it waits for its child
        assert process.poll() is None, output.read_text()
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    assert process.wait(HANG_S) == 128 + number
    last = output.read_text().splitlines()[-1]
    assert last == f"verl_patches: {interruption_text(number)}"
    assert "failed" not in output.read_text() and "Traceback" not in output.read_text()
    assert psutil.wait_procs(children, timeout=HANG_S)[1] == []
