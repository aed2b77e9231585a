"""Drills on one machine: each ends within its bound, names the culprit in one sentence, and leaves nothing behind."""

import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
import yaml

from verl_patches.cluster import gather, node
from verl_patches.cluster.job import Job, read_job
from verl_patches.cluster.place import Place, place_of
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.platform.npu import machine
from verl_patches.processes import started_at

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNET = 0x40000000  # sched.h
HOST = "127.0.0.2"  # Ray takes 127.0.0.1 for the machine's address


@pytest.fixture(scope="module", autouse=True)
def own_network():
    """A network namespace of these tests, with a loopback alone: no other process has one of its ports."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/thread-self/ns/net") as before:
        if libc.unshare(CLONE_NEWNET):
            pytest.skip(f"network namespaces cannot be made here: {os.strerror(ctypes.get_errno())}")
        try:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            yield
        finally:
            assert libc.setns(before.fileno(), CLONE_NEWNET) == 0


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory(prefix="vp-", dir="/tmp") as made:
        yield Path(made)


@pytest.fixture(scope="module")
def job(folder):
    named = {"folder": str(folder / "f"), "logs": str(folder / "logs"), "python": sys.executable, "checkout": str(ROOT)}
    return Job(name="drill", nodes=1, dies=1, device="GPU", hosts=[HOST], wait_s=300.0, **named)


def changed(job, **changes):
    return read_job(yaml.safe_dump({**json.loads(job.model_dump_json()), **changes}), "job", {})[0]


def cluster(job, verb, *options, environ=None, stdout=subprocess.PIPE):
    command = [sys.executable, "-m", "verl_patches", "cluster", verb, "-", *options]
    text = yaml.safe_dump(json.loads(job.model_dump_json()))
    env = {**os.environ, **(environ or {})}
    streams = {"input": text, "text": True, "stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(command, **streams, cwd=ROOT, env=env, timeout=600)


def status(job):
    """(exit code of status, {name: row})"""
    done = cluster(job, "status", "--json")
    return done.returncode, {row["name"]: row for row in json.loads(done.stdout)["rows"]}


def of_job(job):
    """Processes with the job's folder in their command, or its mark."""
    found = []
    for process in psutil.process_iter():
        try:
            marked = process.environ().get(node.MARK, "").startswith(f"{job.name}-")
            if marked or f"{job.folder}/ray" in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def test_the_place_of_a_node_comes_from_options_the_environment_or_the_hosts(job):
    several = changed(job, nodes=3, hosts=[HOST, "127.0.0.3", "192.0.2.77"])
    assert place_of(several, {}, rank=1) == Place(1, HOST, "127.0.0.3")
    assert place_of(changed(job, hosts=[]), {"MASTER_ADDR": "127.0.0.4"}).head == "127.0.0.4"
    named = place_of(changed(job, nodes=2, hosts=[], interface="lo"), {"NODE_RANK": "1", "MASTER_ADDR": HOST})
    assert named == Place(1, HOST, "127.0.0.1")
    for environ, rank, text in (
        ({}, None, "which node of job drill is this"),  # two of the hosts are this machine
        ({"NODE_RANK": "x"}, None, "NODE_RANK is 'x'"),
        ({}, 3, "expected 0 to 2"),
        ({}, 2, "node 2 .192.0.2.77. is none of this machine's addresses"),
        ({"MASTER_ADDR": "192.0.2.77"}, 0, "its address 192.0.2.77 is none of this machine"),
        ({"MASTER_ADDR": "127.0.0.1"}, 0, "the loopback, which other nodes cannot reach"),
        ({"MASTER_ADDR": "no.such.host.invalid"}, 0, "no.such.host.invalid cannot be resolved"),
    ):
        with pytest.raises(ConfigError, match=text):
            place_of(several, environ, rank)
    with pytest.raises(ConfigError, match="interface odd0"):
        place_of(changed(job, nodes=2, hosts=[], interface="odd0"), {"MASTER_ADDR": HOST}, 1)
    with pytest.raises(ConfigError, match="the address of Ray's head is unknown"):
        place_of(changed(job, nodes=2, hosts=[]), {"NODE_RANK": "1"})


def test_a_head_that_is_not_there_is_named_after_the_wait(job):
    lost = changed(job, name="lost", nodes=2, hosts=[HOST, "127.0.0.3"], wait_s=2.0)
    done = cluster(lost, "up", "--node-rank", "1")
    assert done.returncode == 1, done.stderr
    address = f"{HOST}:{job.ports.gcs}"
    assert f"node 1 (127.0.0.3): Ray's head {address} did not answer within 2 s (Connection refused)" in done.stderr
    assert of_job(lost) == [] and node.records(Path(job.folder)) == []


def test_a_port_that_is_taken_is_named_with_its_process(job):
    with socket.create_server((HOST, job.ports.first)):
        done = cluster(job, "up")
    text = f"port {job.ports.first} (Ray's node manager) by pid {os.getpid()}"
    assert done.returncode == 2 and text in done.stderr, done.stderr
    assert of_job(job) == [] and node.records(Path(job.folder)) == []


def test_missing_nodes_are_named_each_with_the_reason(job):
    several = changed(job, nodes=5, hosts=[HOST, "127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6"])

    def member(rank, alive=True, name="drill"):
        return {"rank": rank, "address": f"127.0.0.{rank + 2}", "job": name, "alive": alive}

    with socket.create_server(("127.0.0.5", job.ports.first)):
        nodes = [member(0), member(1, alive=False), member(4, name="other")]
        found = node.missing_nodes(several, nodes)
    assert sorted(found) == [1, 2, 3, 4]
    assert "raylet ended" in found[1] and "another head" in found[3]
    assert f"node 2 (127.0.0.4): port {job.ports.first} of its raylet: Connection refused" == found[2]
    assert node.missing_nodes(several, [*nodes, member(1)]).keys() == {2, 3, 4}  # it came back
    assert "never joined" in node.missing_nodes(changed(several, hosts=[]), nodes)[2]


@pytest.mark.slow
def test_a_head_whose_node_is_missing_names_it_and_ends_what_it_started(job):
    two = changed(job, name="two", nodes=2, hosts=[HOST, "127.0.0.3"], wait_s=15.0)
    done = cluster(two, "up", "--node-rank", "0")
    assert done.returncode == 1, done.stderr
    assert "1 of 2 nodes of job two are not in Ray after 15 s: node 1 (127.0.0.3): port" in done.stderr
    assert "cluster down copies them" in done.stderr and of_job(two) == []
    down = cluster(two, "down")
    assert down.returncode == 0 and (Path(job.logs) / f"node-0-{HOST}" / "ray" / "gcs_server.out").is_file()
    assert node.records(Path(job.folder)) == [] and not (Path(job.folder) / "ray").exists()


@pytest.fixture(scope="module")
def running(job):
    done = cluster(job, "up")
    try:
        assert done.returncode == 0, done.stderr
        yield node.records(Path(job.folder))[0]
    finally:
        cluster(job, "down")


@pytest.mark.slow
def test_a_node_listens_where_the_docs_say(job, running):
    """Docs name ports by the plan; Ray's metrics have ports of their own."""
    found = {}
    for process in node.living(running):
        for each in (process, *process.children(recursive=True)):
            found |= {c.laddr.port: c.laddr.ip for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    first, last = job.ports.workers
    others = {port for port in found if not first <= port <= last}
    planned = {span[0] for name, span in job.port_plan.spans().items() if name != "Ray's workers"}
    assert others - {44217, 44227} <= planned and len(others) >= 9, (others, planned)
    folder = Path(job.folder)
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / node.RAY_TEMP).stat().st_uid == os.getuid()


@pytest.mark.slow
def test_a_second_up_joins_or_refuses(job, running):
    again = cluster(job, "up", "--run")
    assert again.returncode == 2 and "has no command" in again.stderr
    again = cluster(changed(job, command=["sh", "-c", 'echo "$A $HF_TOKEN"; exit 5'], secrets=["HF_TOKEN"]), "up")
    assert again.returncode == 2 and "needs HF_TOKEN" in again.stderr
    again = cluster(changed(job, command=["sh", "-c", "echo ran; exit 5"]), "up", "--run")
    assert again.returncode == 5 and "is up already: nothing was started" in again.stderr and again.stdout == "ran\n"
    code, rows = status(job)
    assert code == 1 and rows["command"]["found"] == "ended with exit code 5"
    assert cluster(job, "follow", "--skip", "2").stdout == "n\n"
    start = time.monotonic()
    assert [found["job"] for found in node.members(changed(job, name="other"), HOST, 1, 2.0)] == ["drill"]
    assert time.monotonic() - start >= 2  # a node of another job is not one that it waits for
    assert node.records(Path(job.folder)) == [running] and node.ended(running) == []
    for changes, name in (({"name": "other"}, "other"), ({"image": "other"}, "drill")):
        other = cluster(changed(job, **changes), "up")
        assert other.returncode == 2 and f"node 0 ({HOST}) of job drill" in other.stderr
        assert f"this is job {name}" in other.stderr
    assert cluster(changed(job, name="other"), "down").returncode == 0 and node.ended(running) == []


@pytest.mark.slow
def test_a_killed_raylet_is_a_problem_of_status_and_down_ends_its_own_alone(job, running, folder):
    assert [row["state"] for name, row in status(job)[1].items() if name != "command"] == ["fine", "fine"]
    (raylet,) = (entry for entry in running.processes if entry["name"] == "raylet")
    alike = ["raylet", f"--raylet_socket_name={job.folder}/ray/session_x/sockets/raylet", "3600"]
    foreign = subprocess.Popen(["bash", "-c", f"exec -a '{' '.join(alike)}' sleep 3600"])
    plog = folder / "plog" / "debug" / "plog"
    plog.mkdir(parents=True)
    (plog / "plog-1.log").write_text("[ERROR] HCCL\n")
    (plog / "old.log").write_text("of another run\n")
    os.utime(plog / "old.log", (1, 1))
    try:
        os.kill(raylet["pid"], signal.SIGKILL)
        while node.recorded_process(raylet):
            time.sleep(0.1)
        code, rows = status(job)
        assert code == 1 and f"raylet (pid {raylet['pid']})" in rows[f"node 0 ({HOST})"]["found"]
        again = cluster(job, "up")
        assert again.returncode == 1 and "lost raylet" in again.stderr
        down = cluster(job, "down", environ={gather.PLOG_VARIABLE: str(folder / "plog")})
        assert down.returncode == 0 and f"ended: node 0 ({HOST})" in down.stderr
        assert foreign.poll() is None and [process.pid for process in of_job(job)] == [foreign.pid]
    finally:
        foreign.kill()
        foreign.wait()
    logs = Path(job.logs) / f"node-0-{HOST}"
    assert (logs / "ray" / "gcs_server.out").is_file()
    assert [path.name for path in (logs / "plog").glob("**/*.log")] == ["plog-1.log"]
    assert not (Path(job.folder) / "ray").exists()
    done = cluster(job, "down")
    assert done.returncode == 0 and "nothing of job drill ran here" in done.stderr
    assert cluster(job, "status").returncode == 1


def test_a_process_with_a_recorded_number_but_another_start_is_not_the_nodes(job):
    entry = {"pid": os.getpid(), "started": started_at(os.getpid()), "name": "x"}
    started = node.Started("drill", "d", 0, HOST, HOST, "no-mark", 0.0, [entry])
    assert node.ended(started) == []
    other = dataclasses.replace(started, processes=[{**entry, "started": entry["started"] + 1}])
    assert node.ended(other) == [f"x (pid {os.getpid()})"] and node.living(other) == []


def test_a_step_of_the_clock_ends_no_node(job, monkeypatch):
    """The kernel's boot time moves with the clock; psutil adds it to a process's start (the control)."""
    entry = {"pid": os.getpid(), "started": started_at(os.getpid()), "name": "x"}
    before, boot = psutil.Process().create_time(), psutil.boot_time()
    monkeypatch.setattr("psutil._pslinux.boot_time", lambda: boot + 2)
    # psutil 5's copy of it: Ray brings that version, and it is the one here where Ray was imported first
    monkeypatch.setattr("psutil._pslinux.BOOT_TIME", boot + 2, raising=False)
    assert psutil.Process().create_time() - before > 1
    assert node.ended(node.Started("drill", "d", 0, HOST, HOST, "no-mark", 0.0, [entry])) == []


def test_another_command_at_work_is_named_and_the_node_left_alone(job):
    """ConfigError is exit code 2, for which `up` over ssh ends nothing on that host."""
    with node.one_command_in(node._folder(job)), pytest.raises(ConfigError, match="another `cluster` command"):
        node.up(job, Place(0, HOST, HOST), {}, lambda text: None)


def test_a_holder_of_the_lock_that_does_not_end_is_named(job, monkeypatch):
    """It is this process, which is not a `cluster` command and so is not ended. Control: it lets the lock go."""
    monkeypatch.setattr(node, "END_HOLDER_S", 0.3)
    with node.one_command_in(node._folder(job)):
        with pytest.raises(RecipeError, match="could not be ended within 0.3 s"):
            node.down(job)
    assert node.down(job) == []


def test_logs_travel_as_an_archive_and_anything_else_is_refused(tmp_path):
    for data in (b"no archive", b""):
        with pytest.raises(RecipeError, match=f"expected a tar archive, found {len(data)} bytes"):
            gather.unpack(data, tmp_path)


@pytest.fixture
def logged(job, tmp_path):
    """A job with a record and logs in a folder of its own, without processes; Ray was started twice."""
    folder, plog = tmp_path / "f", tmp_path / "plog"
    sessions = folder / "ray" / "session_2" / "logs", folder / "ray" / "session_1" / "logs"
    for path, text in ((sessions[0], "text"), (sessions[1], "of the first start"), (plog, "text")):
        path.mkdir(parents=True)
        (path / "raylet.out.log").write_text(text)
    record = node.Started("drill", "d", 0, HOST, HOST, "no-mark", 0.0)
    (folder / "node-0.json").write_text(json.dumps(dataclasses.asdict(record)))
    return changed(job, folder=str(folder), env={gather.PLOG_VARIABLE: str(plog)}, logs=str(tmp_path / "logs"))


def test_a_log_that_was_rotated_away_loses_no_other(logged, tmp_path, monkeypatch):
    monkeypatch.setenv(gather.PLOG_VARIABLE, "/nonexistent")  # the job's counts
    for folder in (tmp_path / "plog", tmp_path / "f" / "ray" / "session_2" / "logs"):
        (folder / "gone.log").symlink_to("/nonexistent")
    (made,) = gather.gather(logged, tmp_path / "to")
    assert {path.relative_to(made).as_posix() for path in made.glob("**/*.log")} == {
        "ray/raylet.out.log",
        "plog/raylet.out.log",
    }


def test_logs_that_could_not_be_copied_stay_for_another_down(logged, tmp_path):
    (tmp_path / "logs").write_text("a file where the folder should be")
    first = cluster(logged, "down")
    assert first.returncode == 1 and "logs could not be gathered" in first.stderr
    with Path("/dev/full").open("w") as full:  # as a disk without space, or a caller who has gone
        done = cluster(logged, "down", "--logs", "-", stdout=full)
    assert done.returncode == 1 and "another cluster down (--logs FOLDER) gathers them" in done.stderr
    with (tmp_path / "archive").open("wb") as archive:
        done = cluster(logged, "down", "--logs", "-", stdout=archive)
    gather.unpack((tmp_path / "archive").read_bytes(), tmp_path / "unpacked")  # the receiver may yet lose it
    assert done.returncode == 0 and (tmp_path / "unpacked" / f"node-0-{HOST}").is_dir()
    assert cluster(logged, "down", "--logs", str(tmp_path / "other")).returncode == 0
    assert (tmp_path / "other" / f"node-0-{HOST}" / "ray" / "raylet.out.log").read_text() == "text"
    assert not (tmp_path / "f" / "ray").exists() and node.records(tmp_path / "f") == []


def test_logs_that_nobody_wants_are_not_copied(logged, tmp_path):
    assert cluster(logged, "down", "--logs", "none").returncode == 0
    assert not (tmp_path / "logs").exists() and not (tmp_path / "f" / "ray").exists()


def test_a_jobs_own_paths_come_behind_its_checkout(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/outer")
    for env, paths in (({}, "/outer"), ({"PYTHONPATH": "/mine"}, "/mine")):
        job = Job(name="j", nodes=1, dies=1, checkout="/c", env=env)
        assert node.node_environment(job, {}, "m")["PYTHONPATH"] == f"/c:{paths}"


def test_ray_of_npus_gets_jemalloc_unless_the_job_says_otherwise(tmp_path, monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr(machine, "JEMALLOC", (str(tmp_path),))
    npu, gpu = (Job(name="j", nodes=1, dies=1, device=device) for device in ("NPU", "GPU"))
    assert "LD_PRELOAD" not in node.node_environment(npu, {}, "m")
    (tmp_path / "libjemalloc.so.2").touch()
    assert node.node_environment(npu, {}, "m")["LD_PRELOAD"] == f"{tmp_path}/libjemalloc.so.2"
    assert "LD_PRELOAD" not in node.node_environment(gpu, {}, "m")
    own = npu.model_copy(update={"env": {"LD_PRELOAD": ""}})
    assert node.node_environment(own, {}, "m")["LD_PRELOAD"] == ""
