"""Test node.sh on one machine: each call ends within its bound, names the culprit, and leaves nothing behind.

The quick tests have two programs with the names of Ray's processes in place of Ray; the slow ones have Ray.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.jobs.conftest import ended
from verl_patches.errors import ConfigError
from verl_patches.launch.jobs.job import Job
from verl_patches.launch.jobs.node import missing_nodes, node_addresses

ROOT = Path(__file__).resolve().parents[3]
CLONE_NEWNET = 0x40000000  # sched.h
HOST = "127.0.0.2"  # Ray takes 127.0.0.1 for the machine's address
GATED_COMMAND = 'echo "on $TOKEN"; while [ ! -e "$GATE" ]; do sleep 0.02; done; echo off; exit 3'


@pytest.fixture(scope="module", autouse=True)
def own_network():
    """Enter a network namespace with a loopback alone, in which no other process has a port."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET):
            pytest.skip(f"network namespaces cannot be made here: {os.strerror(ctypes.get_errno())}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0


@pytest.fixture
def job():
    """Make a job of this machine; its folder's name is short, for the names of Ray's sockets."""
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp") as made:
        named = {"folder": f"{made}/f", "logs": f"{made}/logs", "python": sys.executable, "checkout": str(ROOT)}
        env = {"GATE": f"{made}/gate", "ASCEND_PROCESS_LOG_PATH": f"{made}/plog"}
        sizes = {"nodes": 1, "dies": 1, "device": "GPU", "hosts": [HOST], "wait_s": 300}
        of_job = {"name": "drill", **sizes, "env": env, "command": ["bash", "-c", GATED_COMMAND], **named}
        yield of_job
        for process in marked(of_job):  # left by a test that failed
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def begin(scripts, call):
    """Return begin(job, verb, *arguments), which starts node.sh as a process; "0" stands for no arguments."""
    return lambda job, verb, *words, **environ: call(scripts(job) / "node.sh", verb, *(words or ("0",)), **environ)


@pytest.fixture
def node(begin):
    """Return node(job, verb, *arguments), which runs node.sh and returns (exit code, output, errors)."""
    return lambda *words, **environ: ended(begin(*words, **environ))


def marked(job):
    """Return the processes of a job."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("CLUSTER_NODE_MARK", "").startswith(f"{job['name']}-"):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture
def stand_in(job, tmp_path):
    """Make a job whose `ray start` starts two programs with the names of Ray's."""
    for name in ("raylet", "gcs_server"):
        shutil.copy("/bin/sleep", tmp_path / name)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/bash\n[[ "$*" = *ray.scripts.scripts* ]] || exec {sys.executable} "$@"\n'
        f"{tmp_path}/raylet 600 & {tmp_path}/gcs_server 600 &\n"
    )
    python.chmod(0o755)
    return {**job, "python": str(python)}


def test_a_nodes_address_is_its_entry_of_hosts_its_interfaces_or_its_routes():
    hosts = [HOST, "127.0.0.3", "192.0.2.77"]
    assert node_addresses(1, 3, HOST, "", 6379, hosts) == ("127.0.0.3", HOST)
    assert node_addresses(0, 1, "127.0.0.4", "", 6379, []) == ("127.0.0.4", "127.0.0.4")
    assert node_addresses(1, 2, HOST, "lo", 6379, []) == ("127.0.0.1", HOST)
    assert node_addresses(0, 1, "", "", 6379, []) == ("127.0.0.1", "127.0.0.1")
    for words, text in (
        ((2, 3, HOST, "", 6379, hosts), "192.0.2.77 is not an address of this machine"),
        ((0, 3, "192.0.2.77", "", 6379, hosts), "its address 192.0.2.77 is not one of this machine"),
        ((1, 3, "127.0.0.1", "", 6379, hosts), "the loopback on this machine, not node 0"),
        ((0, 3, "127.0.0.1", "", 6379, []), "set interface, or give an IP address"),
        ((1, 3, "no.such.host.invalid", "", 6379, hosts), "no.such.host.invalid cannot be resolved"),
        ((1, 2, HOST, "odd0", 6379, []), "interface odd0"),
        ((1, 2, "", "", 6379, []), "the address of Ray's head is unknown"),
    ):
        with pytest.raises(ConfigError, match=text):
            node_addresses(*words)


def test_missing_nodes_are_named_each_with_the_reason():
    def member(rank, alive=True, name="drill"):
        return {"rank": rank, "address": f"127.0.0.{rank + 2}", "job": name, "alive": alive}

    nodes = [member(0), member(1, alive=False), member(2, name="other")]
    found = missing_nodes("drill", 3, [HOST, "127.0.0.3", "127.0.0.4"], nodes)
    assert found[1] == "node 1 (127.0.0.3) had joined, then its raylet ended or lost the network"
    assert found[2] == "node 2 (127.0.0.4) never joined" and len(found) == 2
    assert missing_nodes("drill", 3, [], [*nodes, member(1)]) == {2: "node 2 never joined"}  # node 1 has joined again


def test_a_head_that_is_not_there_is_named_after_the_wait(job, node):
    lost = {**job, "nodes": 2, "hosts": [HOST, "127.0.0.3"], "wait_s": 2}
    code, _, err = node(lost, "up", "1")
    assert code == 1 and f"Ray's head {HOST}:6379 did not answer within 2 s (Connection refused)" in err
    assert marked(job) == [] and not (Path(job["folder"]) / "started").exists()


def test_a_rank_that_is_none_is_refused(job, node):
    code, _, err = node({**job, "nodes": 2, "hosts": []}, "check", "2", MASTER_ADDR=HOST, NODE_RANK="")
    assert code == 2 and "expected 0 to 1, found 2" in err


def test_results_that_this_user_cannot_write_are_named_with_the_export_that_mends_it(job, node):
    code, _, err = node({**job, "command": ["true", "recipe.output_root=/proc/self"]}, "check")
    assert code == 2 and "/proc/self: this user cannot write there" in err and "no_root_squash" in err


def test_a_second_call_joins_or_refuses(stand_in, node):
    job = stand_in
    assert node(job, "check") == (0, f"{BEGINS_LINE}free {HOST}\n", "")
    assert node(job, "up", "0", HOST, MASTER_ADDR="10.9.9.9")[0] == 0  # an image's MASTER_ADDR is ignored
    code, _, err = node(job, "up")
    assert code == 0 and f"is up already at {HOST}" in err
    assert node(job, "check")[1] == f"{BEGINS_LINE}up {HOST}\n" and len(marked(job)) == 2
    for changes in ({"name": "other"}, {"dies": 2}):
        code, _, err = node({**job, **changes}, "up")
        assert code == 2 and "node 0 of job drill" in err and "is up in" in err, err
    assert node({**job, "name": "other"}, "end")[0] == 0 and len(marked(job)) == 2
    next(process for process in marked(job) if process.name() == "raylet").kill()
    code, _, err = node(job, "up")
    assert code == 2 and "its raylet or GCS has ended" in err
    holder = subprocess.Popen(["flock", f"{job['folder']}/.lock", "sleep", "600"])
    while subprocess.run(["flock", "--nonblock", f"{job['folder']}/.lock", "true"]).returncode == 0:
        assert holder.poll() is None
    assert "another call of node.sh runs in" in node(job, "up")[2]
    psutil.Process(holder.pid).children()[0].kill()
    holder.wait()


BEGINS_LINE = "verl_patches: output begins\n"


def test_the_commands_output_from_any_byte_its_code_and_its_environment(stand_in, node, begin, monkeypatch):
    monkeypatch.setenv("TOKEN", "t")
    job, gate = stand_in, Path(stand_in["env"]["GATE"])
    assert node(job, "run", "0", "a")[0] == 1 and "does not run here" in node(job, "run", "0", "a")[2]
    node(job, "up")
    assert node(job, "state")[1] == f"{BEGINS_LINE}none\n"
    assert "no command of job drill was started on this node: start it with run.sh" in node(job, "follow", "0", "0")[2]
    assert node(job, "run", "0", "a")[0] == 0 and node(job, "state")[1] == f"{BEGINS_LINE}running\n"
    assert "runs already" in node(job, "run", "0", "b")[2]
    code, _, err = node({**job, "command": ["true"]}, "run", "0", "b")
    assert code == 2 and "another command of job drill runs" in err
    follower = begin(job, "follow", "0", "0")
    assert [follower.stdout.readline() for _ in range(2)] == [BEGINS_LINE, "on t\n"]
    gate.touch()
    assert ended(follower)[:2] == (3, "off\n") and node(job, "state")[1] == f"{BEGINS_LINE}3\n"
    assert node(job, "follow", "0", "5")[:2] == (3, f"{BEGINS_LINE}off\n")
    node(job, "run", "0", "a")  # a call that was lost, made again: the command is not started twice
    assert not (Path(job["folder"]) / "command-2.log").exists()
    shown = {**job, "upstream": ["/u"], "command": ["bash", "-c", 'echo "$PYTHONPATH $RAY_ADDRESS"; kill -9 $$']}
    node(shown, "run", "0", "c", PYTHONPATH="/outer", RAY_ADDRESS="x")
    code, out, _ = node(shown, "follow", "0", "0")
    assert code == 137 and out.startswith(f"{BEGINS_LINE}{ROOT}:/u:/outer \n")
    gate.unlink()
    npu = {**job, "env": {**job["env"], "GREETING": "a b"}, "device": "NPU"}
    assert node(npu, "run", "0", "d", LD_PRELOAD="/m/libjemalloc.so")[0] == 0
    shell = psutil.Process(int((Path(job["folder"]) / "command").read_text().split()[2]))
    assert shell.environ()["LD_PRELOAD"] == "/m/libjemalloc.so"
    os.killpg(shell.pid, signal.SIGKILL)
    psutil.wait_procs([shell])
    assert node(job, "state")[1] == f"{BEGINS_LINE}killed\n"
    assert "was killed; it has no exit code" in node(job, "follow", "0", "0")[2]


def test_end_ends_its_own_alone_and_clean_leaves_nothing(stand_in, node, tmp_path):
    job = stand_in
    other = subprocess.Popen([tmp_path / "raylet", "600"])  # a process of another Ray
    try:
        node(job, "up")
        node(job, "run", "0", "a")
        hard = {**os.environ, "CLUSTER_NODE_MARK": marked(job)[0].environ()["CLUSTER_NODE_MARK"]}
        deaf = subprocess.Popen(
            ["bash", "-c", 'trap "" TERM; while :; do sleep 0.1; done'], env=hard, start_new_session=True
        )
        assert node(job, "end") == (0, BEGINS_LINE, "")
        assert marked(job) == [] and other.poll() is None and deaf.wait(60) == -signal.SIGKILL
        assert node(job, "end")[0] == 0  # idempotent
        node(job, "clean")
        assert {path.name for path in Path(job["folder"]).iterdir()} == {".lock"}
        assert Path(job["folder"]).stat().st_mode & 0o777 == 0o700
    finally:
        other.kill()
        other.wait()


def test_logs_are_those_since_up_and_of_two_sessions_the_newest(stand_in, node, tmp_path):
    job, folder = stand_in, Path(stand_in["folder"])
    node(job, "up")
    plog = folder.parent / "plog" / "debug"
    for path, text in (
        (folder / "ray/session_2026-01-01/logs/raylet.out", "old"),
        (folder / "ray/session_2026-01-02/logs/raylet.out", "new"),
        (folder / "ray/session_2026-01-02/logs/gone.log", ""),
        (plog / "plog-1.log", "[ERROR] HCCL"),
        (plog / "old.log", "of another run"),
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    os.utime(plog / "old.log", (1, 1))
    (plog / "link.log").symlink_to("/nonexistent")
    words = ["bash", str(tmp_path / "scripts" / "node.sh"), "logs", "0"]
    done = subprocess.run(words, capture_output=True, check=True)
    (tmp_path / "a.tar.gz").write_bytes(done.stdout.removeprefix(BEGINS_LINE.encode()))
    with tarfile.open(tmp_path / "a.tar.gz") as archive:
        archive.extractall(tmp_path / "to", filter="data")
    found = {str(path.relative_to(tmp_path / "to")) for path in (tmp_path / "to").rglob("*") if path.is_file()}
    assert found == {"ray/raylet.out", "plog/debug/plog-1.log", "ray_start.log"}
    assert (tmp_path / "to/ray/raylet.out").read_text() == "new" and done.stderr == b""


@pytest.mark.slow
def test_serve_runs_the_command_and_ends_with_its_code_its_logs_and_nothing_left(job, begin):
    process = begin({**job, "secrets": ["TOKEN"]}, "serve", TOKEN="t")
    assert process.stdout.readline() == "on t\n"
    Path(job["env"]["GATE"]).touch()
    code, out, err = ended(process)
    assert (code, out) == (3, "off\n"), err
    assert (Path(job["logs"]) / f"node-0-{HOST}" / "command-1.log").read_text() == "on t\noff\n"
    assert marked(job) == [] and {path.name for path in Path(job["folder"]).iterdir()} == {".lock"}


def first_named(job, name):
    """Return the oldest process of this name in a job: its newest forks have its name too."""
    found = []
    for each in marked(job):
        with suppress(psutil.NoSuchProcess):
            if each.name() == name:
                found.append(each)
    return min(found, key=psutil.Process.create_time)


@pytest.mark.slow
def test_ray_listens_where_the_docs_say_and_all_of_it_ends(job, begin):
    """Check the ports of the docs and Ray's own metrics ports; a signal ends serve and all that it started."""
    process = begin(job, "serve")
    assert process.stdout.readline() == "on \n"
    planned = Job(**job).port_plan.spans()
    first, last = planned.pop("Ray's workers")
    raylet = first_named(job, "raylet")

    def others():
        """Return the ports of Ray's services, without those of workers."""
        found = set()
        for each in {*marked(job), *raylet.children(recursive=True)}:
            with suppress(psutil.NoSuchProcess):  # such as a `sleep` between two looks
                connections = each.net_connections("inet")
                found |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN}
        return {port for port in found if not first <= port <= last}

    while len(others()) < 9:
        assert process.poll() is None
        time.sleep(0.2)
    assert others() - {44217, 44227} <= {span[0] for span in planned.values()}, others()
    children = raylet.children(recursive=True)
    of_job = {*marked(job), *children}
    os.kill(process.pid, signal.SIGTERM)
    code, _, err = ended(process)
    assert code == 143 and psutil.wait_procs(of_job, timeout=60)[1] == [], err
    assert (Path(job["logs"]) / f"node-0-{HOST}" / "ray" / "gcs_server.out").is_file()
