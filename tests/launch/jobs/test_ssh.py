"""Test the rendered scripts over a real ssh: two nodes in network namespaces, each with an sshd (namespaces.py)."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from tests.launch.jobs.conftest import ended, files_with
from tests.launch.jobs.namespaces import Nodes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[3]
SECRET = "s3cret it's $PATH="
# waits for a file after each line, so that the tests decide when it goes on
WORDS = 'for i in 1 2 3; do echo "line $i of $A"; while [ ! -e "$GATE/$i" ]; do sleep 0.05; done; done; '
WORDS += '[ "${#HF_TOKEN}" = 18 ] || exit 4; exit 5'


@pytest.fixture(scope="module")
def nodes():
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with Nodes(2, Path(folder), real_ssh=True) as made:
            yield made


@pytest.fixture
def job(nodes, tmp_path):
    sizes = {"nodes": 2, "dies": 1, "device": "GPU", "hosts": nodes.hosts, "wait_s": 240}
    paths = {"checkout": str(ROOT), "python": sys.executable, "folder": str(nodes.shared)}
    command = {"command": ["bash", "-c", WORDS], "env": {"A": "a b", "GATE": str(tmp_path)}, "secrets": ["HF_TOKEN"]}
    by_ssh = {"name": "over-ssh", "provider": "ssh", "logs": str(tmp_path / "logs"), "ssh": {"command": nodes.ssh}}
    return {**by_ssh, **sizes, **paths, **command}


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)


def gate(job, number):
    (Path(job["env"]["GATE"]) / str(number)).touch()


@pytest.fixture
def process_lines():
    """Collect the command lines of all processes while the test runs."""
    seen, end = set(), threading.Event()

    def look():
        while not end.wait(0.05):
            for process in psutil.process_iter():
                try:
                    seen.add(" ".join(process.cmdline()))
                except psutil.Error:
                    continue

    thread = threading.Thread(target=look)
    thread.start()
    yield seen
    end.set()
    thread.join()


def test_the_command_outlives_its_callers_and_lost_connections_and_its_code_is_true(
    nodes, job, scripts, call, tmp_path, process_lines
):
    made = scripts(job)
    try:
        code, _, err = ended(call(made / "up.sh"))
        assert code == 0 and "all 2 nodes of job over-ssh have joined Ray" in err, err
        code, _, err = ended(call(made / "up.sh"))
        assert code == 0 and err.count("is up already") == 2, err
        first = call(made / "run.sh")
        assert first.stdout.readline() == "line 1 of a b\n"
        os.killpg(first.pid, signal.SIGKILL)  # kills its ssh too, as if the caller's machine were lost
        first.communicate()
        second = call(made / "follow.sh")
        assert second.stdout.readline() == "line 1 of a b\n"
        os.killpg(second.pid, signal.SIGINT)
        code, _, err = ended(second)
        assert code == 130 and "the command still runs: follow.sh shows its output again" in err, err

        third = call(made / "run.sh")
        assert third.stdout.readline() == "line 1 of a b\n"
        gate(job, 1)
        assert third.stdout.readline() == "line 2 of a b\n"
        nodes.drop_connections(0)
        gate(job, 2)
        gate(job, 3)
        code, out, err = ended(third)
        assert code == 5 and out == "line 3 of a b\n" and "was lost; the command still runs" in err, (code, out, err)
        assert "runs already" in err  # one command, for three callers
        code, out, _ = ended(call(made / "follow.sh"))
        assert code == 5 and out.count("\n") == 3
        written = files_with(SECRET.encode(), made, nodes.folder)
    finally:
        down = ended(call(made / "down.sh"))
    assert down[0] == 0, down
    logs = tmp_path / "logs"
    assert {path.name for path in logs.iterdir()} == {f"node-{rank}-{host}" for rank, host in enumerate(nodes.hosts)}
    head = logs / f"node-0-{nodes.hosts[0]}"
    assert (head / "command-1.log").read_text().count("\n") == 3 and (head / "ray" / "gcs_server.out").is_file()
    assert nodes.processes(0) == nodes.processes(1) == []
    assert {path.name for path in (nodes.folder / "0").iterdir()} == {".lock"}
    # the secret, which the command had (its exit code), is in no file and on no command line; the controls are
    assert written == files_with(SECRET.encode(), logs) == [] and files_with(b"line 1 of", logs) != []
    lines = "\n".join(process_lines)
    assert SECRET not in lines and "s3cret" not in lines and "bash -s -- up 1" in lines
    code, _, err = ended(call(made / "follow.sh"))
    assert code == 1 and "no command of job over-ssh was started" in err


def test_a_taken_port_is_named_and_an_up_that_fails_brings_the_logs(nodes, job, scripts, call, tmp_path):
    taken = "import socket, time; s = socket.create_server(('0.0.0.0', 6380)); print('on', flush=True); time.sleep(600)"
    holder = nodes.start(1, sys.executable, "-c", taken, stdout=subprocess.PIPE, text=True)
    logs, made = tmp_path / "logs", scripts(job)
    try:
        assert holder.stdout.readline() == "on\n"
        code, _, err = ended(call(made / "up.sh"))
    finally:
        holder.kill()
        holder.wait()
    assert code == 2 and f"node 1 ({nodes.hosts[1]}): port 6380 (Ray's node manager) is taken by pid" in err, err
    assert "nothing was started" in err and nodes.processes(0) == [] and not logs.exists()

    # the python of node 1 does not start Ray
    fails = tmp_path / "python"
    fails.write_text(
        f'#!/bin/bash\n[[ "$*" != *--address=* ]] || {{ echo no luck; exit 1; }}\nexec {sys.executable} "$@"\n'
    )
    fails.chmod(0o755)
    code, _, err = ended(call(scripts({**job, "python": str(fails)}) / "up.sh"))
    assert code == 1 and f"node 1 ({nodes.hosts[1]}): Ray could not be started: no luck" in err, err
    assert f"logs in {logs}" in err and nodes.processes(0) == nodes.processes(1) == []
    assert (logs / f"node-0-{nodes.hosts[0]}" / "ray" / "gcs_server.out").is_file()
    assert (logs / f"node-1-{nodes.hosts[1]}" / "ray_start.log").read_text() == "no luck\n"


@pytest.mark.nightly
def test_a_node_that_is_lost_is_named_and_the_others_are_ended_with_their_logs(nodes, job, scripts, call, tmp_path):
    made, logs = scripts(job), tmp_path / "logs"
    try:
        assert ended(call(made / "up.sh"))[0] == 0
        nodes.cut(1)
        down = ended(call(made / "down.sh"))
    finally:
        nodes.join(1)
    assert down[0] == 1 and f"node 1 ({nodes.hosts[1]}): " in down[2] and f"node 0 ({nodes.hosts[0]}): " not in down[2]
    assert nodes.processes(0) == [] and [path.name for path in logs.iterdir()] == [f"node-0-{nodes.hosts[0]}"]
    assert ended(call(made / "down.sh"))[0] == 0  # the node answers again
    assert nodes.processes(1) == [] and (logs / f"node-1-{nodes.hosts[1]}" / "ray").is_dir()
