"""Ctrl-C of commands that wait: it reaches the whole group of processes, is named as such, and leaves none of them."""

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from tests.ranks import HANG_S
from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import interrupted


def heed_hang_ups():
    """As in a terminal; under nohup, which these tests may be, they are ignored."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.fixture
def started(tmp_path):
    """started(*words): a command in a group of its own, both of its streams in one file."""
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


def an_up(tmp_path, job):
    """A node that waits for Ray's head."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, "hosts": ["127.0.0.2", "127.0.0.3"]}))
    return ["cluster", "up", str(tmp_path / "job.yaml"), "--node-rank", "1"]


def an_up_over_ssh(tmp_path, job):
    (tmp_path / "program").write_text("#!/bin/bash\nexec sleep 600\n")
    (tmp_path / "program").chmod(0o755)
    reached = {"provider": "ssh", "hosts": ["a", "b"], "ssh": {"command": [str(tmp_path / "program")]}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({**job, **reached}))
    return ["cluster", "up", str(tmp_path / "job.yaml")]


SILENT = socket.create_server(("127.0.0.1", 0))


def a_doctor(tmp_path, job):
    """A doctor that asks a Ray which does not answer."""
    address = f"127.0.0.1:{SILENT.getsockname()[1]}"
    return ["doctor", "deepseekv3_tiny_cpu", f"recipe.ray_address={address}", "trainer.nnodes=1"]


@pytest.mark.parametrize(
    ("command", "sign"),
    [(an_up, "waiting for Ray's head"), (an_up_over_ssh, None), (a_doctor, None)],
    ids=["up", "up over ssh", "doctor"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_a_user_ended_is_said_to_be_ended_by_the_user(started, tmp_path, command, sign, number):
    """sign: what the command prints while it waits; None: it waits for a process that it has started."""
    job = {"name": "j", "nodes": 2, "dies": 1, "device": "GPU", "folder": str(tmp_path / "folder")}
    job["ports"] = {"gcs": 1024, "first": 1025}
    output = tmp_path / "output"
    process = started(*command(tmp_path, job))
    while not (sign in output.read_text() if sign else psutil.Process(process.pid).children()):
        assert process.poll() is None, output.read_text()
        time.sleep(0.2)
    children = psutil.Process(process.pid).children(recursive=True)
    os.killpg(process.pid, number)
    assert process.wait(HANG_S) == 128 + number
    last = output.read_text().splitlines()[-1]
    assert last == f"verl_patches: {interrupted(number)}"
    assert "failed" not in output.read_text() and "Traceback" not in output.read_text()
    assert psutil.wait_procs(children, timeout=HANG_S)[1] == []
