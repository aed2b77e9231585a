"""Uploads: what is sent, what is not sent again, what a kill or a failing store leaves; on file systems of fsspec."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fsspec
import pytest
import yaml
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.cluster import command, node, upload
from verl_patches.cluster.job import Job
from verl_patches.cluster.upload import MANIFEST, require_stores, send
from verl_patches.config.environment import REPOSITORY
from verl_patches.errors import ConfigError

JOB = {"name": "j", "nodes": 1, "dies": 1}


class Store(MemoryFileSystem):
    """A store with ETags that counts what it is sent, and fails where `faults` says so."""

    protocol = "counted"
    store, pseudo_dirs, cachable = {}, [""], False
    sent, faults, deleted = [], {}, []

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).replace("counted://", "/"))

    def put_file(self, lpath, rpath, callback=None, **kwargs):
        name = rpath.rpartition("/")[2]
        if fault := self.faults.get(name, self.faults.get("*")):
            raise fault
        self.sent.append(name)
        super().put_file(lpath, rpath, **kwargs)

    def rm_file(self, path):
        self.deleted.append(path)

    rm = _rm = rmdir = rm_file

    def info(self, path, **kwargs):
        found = super().info(path, **kwargs)
        return found if found["type"] == "directory" else {**found, "ETag": str(hash(self.cat_file(path)))}

    def find(self, path, detail=False, **kwargs):
        return {name: self.info(name) for name in super().find(path)}


@pytest.fixture
def store():
    fsspec.register_implementation("counted", Store, clobber=True)
    Store.store.clear()
    Store.sent, Store.faults, Store.deleted = [], {}, []
    yield Store
    assert Store.deleted == []


@pytest.fixture
def results(tmp_path):
    """A run's folder: a whole checkpoint, one that is being written, a log, and what is never sent."""
    folder = tmp_path / "outputs"
    for name in ("global_step_1/a.safetensors", "global_step_2.writing-ab12-x/a.safetensors", "run.log", ".lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "b.json.0a0a0a0a.partial").write_text("half")
    (folder / "link").symlink_to("/etc/hostname")
    return folder


def listed(store, to="/t"):
    return json.loads(store().cat_file(f"{to}/{MANIFEST}"))["files"]


def test_whole_files_are_sent_once_and_a_changed_one_again(store, results):
    sent = send(results, "counted://t", "j")
    assert (sent.files, sent.there, sent.faults) == (2, 0, {}) and store.sent == ["run.log", "a.safetensors"]
    assert set(listed(store)) == {"global_step_1/a.safetensors", "run.log"}
    again = send(results, "counted://t/", "j")
    assert (again.files, again.there) == (0, 2) and len(store.sent) == 2
    os.utime(results / "run.log")  # another time, the same content: read, not sent
    assert send(results, "counted://t", "j").there == 2
    (results / "run.log").write_text("RUN.LOG")  # the same size
    assert send(results, "counted://t", "j").files == 1 and store.sent[-1] == "run.log"
    assert store().cat_file("/t/run.log") == b"RUN.LOG"


def test_a_copy_that_is_not_the_lists_is_sent_again(store, results):
    """By size, by ETag, by absence; and a damaged list is no list."""
    send(results, "counted://t", "j")
    path = "/t/global_step_1/a.safetensors"
    for broken in (b"", b"x" * len("global_step_1/a.safetensors")):
        store().pipe_file(path, broken)
        assert send(results, "counted://t", "j").files == 1 and store().cat_file(path).startswith(b"global")
    del store.store[path]
    assert send(results, "counted://t", "j").files == 1
    for damaged in (b"", b"{", b"[" * 100_000, b'{"job": "j", "files": {"run.log": 3}}'):
        store().pipe_file(f"/t/{MANIFEST}", damaged)
        assert send(results, "counted://t", "j").files == 2


def test_nothing_is_removed_there_and_another_jobs_target_is_left_alone(store, results):
    send(results, "counted://t", "j")
    for path in (results / "global_step_1/a.safetensors", results / "run.log"):
        path.unlink()
    send(results, "counted://t", "j")
    assert store().cat_file("/t/run.log") == b"run.log" and len(listed(store)) == 2
    (results / "run.log").write_text("other")
    sent = send(results, "counted://t", "k")
    assert "has the results of job j" in str(sent) and store().cat_file("/t/run.log") == b"run.log"


def test_a_store_that_fails_is_named_without_secrets_and_the_next_call_sends_the_rest(store, results, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-value")
    monkeypatch.setenv("WANDB", "w4ndb")
    store.faults = {"a.safetensors": PermissionError("denied to s3cret-value\n and w4ndb")}
    sent = send(results, "counted://t", "j", ["WANDB"])
    assert (sent.files, list(sent.faults)) == (1, ["global_step_1/a.safetensors"])
    assert "denied to $AWS_SECRET_ACCESS_KEY and $WANDB" in str(sent)
    assert "w4ndb" in str(send(results, "counted://t", "j"))  # the control: nobody said that it is one
    store.faults = {}
    assert (send(results, "counted://t", "j").files, store.sent.count("run.log")) == (1, 1)
    store.faults = {"*": RuntimeError("no network")}
    for number in range(9):
        (results / f"new{number}").write_text("x")
    assert len(send(results, "counted://t", "j").faults) == upload.GIVE_UP
    assert "No such file" in str(send(results / "absent", "counted://t", "j"))


def test_a_file_that_went_meanwhile_is_no_fault(store, results, monkeypatch):
    real = upload._sha256

    def gone(file):
        if file.name == "a.safetensors":
            file.unlink()
        return real(file)

    monkeypatch.setattr(upload, "_sha256", gone)
    assert (sent := send(results, "counted://t", "j")).faults == {} and sent.files == 1


SLOW = """
import sys, time
from fsspec.implementations.local import LocalFileSystem
put = LocalFileSystem.put_file
def slow(self, lpath, rpath, **kwargs):
    if "3.bin" in rpath:
        open(rpath, "wb").write(b"half")
        print("sending", flush=True)
        time.sleep(600)
    put(self, lpath, rpath, **kwargs)
LocalFileSystem.put_file = slow
from verl_patches.cluster import upload
upload.LIST_S = 0
upload.send(upload.Path(sys.argv[1]), sys.argv[2], "j")
"""


def test_a_killed_upload_leaves_whole_files_and_goes_on(tmp_path):
    source, target = tmp_path / "from", tmp_path / "to"
    source.mkdir()
    for number in range(5):
        (source / f"{number}.bin").write_text(str(number) * 1000)
    words = [sys.executable, "-c", SLOW, str(source), f"file://{target}"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
    assert process.stdout.readline() == b"sending\n"
    process.kill()
    process.wait()
    there = {path.name for path in target.iterdir() if not path.name.endswith(".partial")}
    assert there == {"0.bin", "1.bin", "2.bin", MANIFEST}  # the half of 3.bin has another name
    before = (target / "1.bin").stat().st_mtime_ns
    sent = send(source, f"file://{target}", "j")
    assert (sent.files, sent.there) == (2, 3) and (target / "1.bin").stat().st_mtime_ns == before
    assert all((target / f"{number}.bin").read_text() == str(number) * 1000 for number in range(5))


@pytest.mark.parametrize("to", ["s3://bucket/x", "nosuch://x"])
def test_a_store_without_its_package_is_refused_in_one_sentence_before_anything_starts(to, tmp_path, monkeypatch):
    if to.startswith("s3"):  # also where s3fs is installed
        monkeypatch.setitem(sys.modules, "s3fs", None)
        monkeypatch.delitem(fsspec.registry._registry if hasattr(fsspec.registry, "_registry") else {}, "s3", False)
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job_of(tmp_path, "true", to).model_dump(by_alias=True)))
    monkeypatch.setattr(node, "up", lambda *a: pytest.fail("something was started"))
    done = CliRunner().invoke(app, ["cluster", "up", str(tmp_path / "job.yaml")])
    assert isinstance(done.exception, ConfigError) and to in str(done.exception) and "\n" not in str(done.exception)
    require_stores(["memory://x", "file:///x"])


def job_of(tmp_path, line, to, **more):
    given = {"folder": str(tmp_path / "job"), "checkout": str(tmp_path), "command": ["bash", "-c", line], **more}
    return Job(**JOB, **given, python=sys.executable, uploads=[{"from": "outputs", "to": to}])


def run(job, capfdbinary):
    Path(job.folder).mkdir()
    started = node.Started("j", "d", 0, "127.0.0.2", "127.0.0.2", "j-0-mark", 0.0)
    command.start(job, started, {"TOKEN": "s3cret-token"}, print)
    code = command.follow(job, sys.stdout.buffer)
    return code, capfdbinary.readouterr().out.decode()


GATE = "mkdir -p outputs/global_step_1; echo w > outputs/global_step_1/w; echo l > outputs/log; {}"
WAIT = "while [ ! -e to/global_step_1/w ]; do sleep 0.05; done; [ ! -e to/log ] || exit 9; exit {}"


@pytest.mark.parametrize("code", [0, 3])
def test_a_checkpoint_is_sent_while_the_command_runs_and_the_rest_at_its_end(tmp_path, capfdbinary, code):
    """The command ends only when the checkpoint is there, and fails if its log is there before."""
    job = job_of(tmp_path, GATE.format(WAIT.format(code)), f"file://{tmp_path}/to", secrets=["TOKEN"])
    found, out = run(job, capfdbinary)
    assert found == code and "1 files sent" in out and (tmp_path / "to/log").read_text() == "l\n"
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(b"s3cret-token" in text for text in written)


@pytest.mark.parametrize(("code", "seen"), [(0, 1), (7, 7)])
def test_a_failed_upload_does_not_end_the_command_and_is_its_exit_code(tmp_path, capfdbinary, code, seen):
    (tmp_path / "to").write_text("no folder")
    job = job_of(tmp_path, GATE.format(f"sleep 1.5; echo ended; exit {code}"), f"file://{tmp_path}/to")
    found, out = run(job, capfdbinary)
    assert found == seen and "\nended\n" in out and "NOT SENT" in out and f"the command ended with {code}" in out
    (tmp_path / "to").unlink()
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job.model_dump(by_alias=True)))
    done = CliRunner().invoke(app, ["cluster", "upload", str(tmp_path / "job.yaml"), "--json"])
    assert done.exit_code == 0 and json.loads(done.output)["rows"][0]["state"] == "fine"
    assert (tmp_path / "to/global_step_1/w").exists()


def test_the_command_ends_by_a_signal_with_its_code_and_with_its_uploader(tmp_path):
    words = upload.command_words(job_of(tmp_path, "echo $$ > pid; sleep 600 & wait", f"file://{tmp_path}/to"))
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        (tmp_path / "pid").unlink(missing_ok=True)
        process = subprocess.Popen(words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)})
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait() == code
        pid = int((tmp_path / "pid").read_text())
        while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
            time.sleep(0.05)


def test_a_local_target_keeps_its_class():
    """_put renames on this class alone."""
    assert isinstance(fsspec.core.url_to_fs("file:///x")[0], LocalFileSystem)
