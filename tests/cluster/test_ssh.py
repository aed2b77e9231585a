"""`cluster` over a real ssh: two nodes in network namespaces, each with an sshd (namespaces.py)."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
import yaml

from tests.cluster.namespaces import Nodes

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
# waits for a file after each line, so that the tests decide when it goes on
WORDS = 'for i in 1 2 3; do echo "line $i of $A"; while [ ! -e "$GATE/$i" ]; do sleep 0.05; done; done; exit 5'


@pytest.fixture(scope="module")
def nodes():
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with Nodes(2, Path(folder), real_ssh=True) as made:
            yield made


@pytest.fixture
def job(nodes, tmp_path):
    return {
        "name": "over-ssh",  # the tests beside this one look for the processes of jobs by name
        "provider": "ssh",
        "nodes": 2,
        "dies": 1,
        "device": "GPU",
        "hosts": nodes.hosts,
        "checkout": str(ROOT),
        "python": sys.executable,
        "folder": str(nodes.shared),
        "logs": str(tmp_path / "logs"),
        "wait_s": 240.0,
        "command": ["bash", "-c", WORDS],
        "env": {"A": "a b", "GATE": str(tmp_path)},
        "ssh": {"command": nodes.ssh},
    }


@pytest.fixture
def call(tmp_path):
    """call(job, verb, *options): a `cluster` command as a process with pipes."""
    started = []

    def begin(job, verb, *options):
        path = tmp_path / "job.yaml"
        path.write_text(yaml.safe_dump(job))
        command = [sys.executable, "-m", "verl_patches", "cluster", verb, str(path), *options]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, start_new_session=True, **pipes))
        return started[-1]

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def ended(process):
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def gate(job, number):
    (Path(job["env"]["GATE"]) / str(number)).touch()


def test_the_command_outlives_its_callers_and_lost_connections_and_its_code_is_true(nodes, job, call, tmp_path):
    try:
        assert ended(call(job, "up"))[0] == 0
        first = call(job, "up", "--run")
        assert first.stdout.readline() == "line 1 of a b\n"
        os.killpg(first.pid, signal.SIGKILL)  # with its ssh: the caller's machine is lost
        first.communicate()
        second = call(job, "follow")
        assert second.stdout.readline() == "line 1 of a b\n"
        second.send_signal(signal.SIGINT)
        code, _, err = ended(second)
        assert code == 130 and "the command goes on; cluster follow shows its output again" in err
        code, out, _ = ended(call(job, "status", "--json"))
        assert code == 0 and {row["name"]: row["state"] for row in json.loads(out)["rows"]}["command"] == "fine"

        third = call(job, "up", "--run")
        assert third.stdout.readline() == "line 1 of a b\n"
        gate(job, 1)
        assert third.stdout.readline() == "line 2 of a b\n"
        for process in psutil.Process(third.pid).children(recursive=True):
            process.kill()  # its ssh
        gate(job, 2)
        gate(job, 3)
        code, out, err = ended(third)
        assert code == 5 and out == "line 3 of a b\n" and "the command goes on; trying again" in err
        assert "runs already" in err  # one command, for three callers
        code, out, _ = ended(call(job, "follow"))
        assert code == 5 and out.count("\n") == 3
        code, out, err = ended(call(job, "follow", "--json"))
        assert code == json.loads(out)["code"] == 5 and "line 3 of a b" in err
        code, out, _ = ended(call(job, "status"))
        assert code == 1 and "ended with exit code 5" in out
    finally:
        down = ended(call(job, "down"))
    assert down[0] == 0, down
    logs = tmp_path / "logs"
    assert {path.name for path in logs.iterdir()} == {f"node-{rank}-{host}" for rank, host in enumerate(nodes.hosts)}
    assert (logs / f"node-0-{nodes.hosts[0]}" / "command-1.log").read_text().count("\n") == 3
    assert nodes.processes(0) == nodes.processes(1) == []
    code, _, err = ended(call(job, "follow"))
    assert code == 1 and "no command of job over-ssh was started" in err


@pytest.mark.nightly
def test_down_ends_an_up_that_waits_and_its_command(nodes, job, call):
    waiting = {**job, "nodes": 1, "hosts": nodes.hosts[:1]}
    try:
        running = call(waiting, "up", "--run")
        assert running.stdout.readline() == "line 1 of a b\n"
        assert ended(call(waiting, "down"))[0] == 0
        code, _, err = ended(running)
        assert code == 1 and "was killed; it has no exit code" in err
    finally:
        ended(call(waiting, "down"))
    assert nodes.processes(0) == []

    # node 1 alone waits for its head with the folder locked; whoever called it is gone
    line = f"cd {ROOT} && PYTHONPATH={ROOT} {sys.executable} -m verl_patches cluster up - --node-rank 1"
    given = yaml.safe_dump({**job, "provider": "nodes"})
    alone = subprocess.Popen(
        [*nodes.ssh, nodes.hosts[1], line], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    alone.stdin.write(given)
    alone.stdin.close()
    while "waiting for Ray's head" not in alone.stderr.readline():
        assert alone.poll() is None
    assert ended(call(job, "down"))[0] == 0
    assert alone.wait(600) and nodes.processes(1) == []


@pytest.mark.nightly
def test_an_up_that_fails_brings_the_logs_of_the_nodes_that_started(nodes, job, call, tmp_path):
    taken = "import socket, time; s = socket.create_server(('0.0.0.0', 6380)); print('on', flush=True); time.sleep(600)"
    holder = nodes.start(1, sys.executable, "-c", taken, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout.readline() == "on\n"
        code, _, err = ended(call({**job, "wait_s": 15.0}, "up"))
    finally:
        holder.kill()
        holder.wait()
    logs = tmp_path / "logs"
    assert code == 1 and "port 6380 (Ray's node manager) by pid" in err and f"logs in {logs}" in err
    assert [path.name for path in logs.iterdir()] == [f"node-0-{nodes.hosts[0]}"]
    assert (logs / f"node-0-{nodes.hosts[0]}" / "ray" / "gcs_server.out").is_file()
    assert nodes.processes(0) == nodes.processes(1) == []
    assert {path.name for path in (nodes.folder / "0").iterdir()} == {".lock"}


def test_a_host_without_sshd_and_a_wrong_key_are_named_and_nothing_is_left(nodes, job, call, tmp_path):
    other = tmp_path / "other_key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    config = (nodes.folder / "ssh_config").read_text().replace(str(nodes.folder / "key"), str(other))
    (tmp_path / "ssh_config").write_text(config)
    words = [str(tmp_path / "ssh_config") if word.endswith("ssh_config") else word for word in nodes.ssh]
    code, _, err = ended(call({**job, "ssh": {"command": words}}, "up"))
    assert code == 1 and "nodes 0,1: root@HOST: Permission denied (publickey)" in err, err

    for changes, text in (
        ({"python": "/no/python3"}, "no program /no/python3 (python)"),
        ({"checkout": "/no/checkout"}, "cd: /no/checkout: No such file or directory"),
    ):
        code, _, err = ended(call({**job, **changes}, "up"))
        assert code == 1 and text in err and "nothing was started" in err

    nodes.stop_sshd(1)  # no test comes after this one
    code, _, err = ended(call(job, "up"))
    assert code == 1 and f"node 1 ({nodes.hosts[1]}): " in err and "Connection refused" in err
    assert f"node 0 ({nodes.hosts[0]}): " not in err
    assert nodes.processes(0) == []
