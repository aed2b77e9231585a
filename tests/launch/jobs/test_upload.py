"""Test uploads to file systems of fsspec: files are sent once, also after a kill or a failing store."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from verl_patches.launch.jobs import upload
from verl_patches.launch.jobs.job import Job
from verl_patches.run.environment import REPOSITORY

JOB = {"name": "j", "nodes": 1, "dies": 1}


@pytest.fixture
def store(monkeypatch):
    """Hold fsspec's store in memory; `sent` has the names that were sent, and `faults` the names that fail."""
    made = MemoryFileSystem()
    made.store.clear()
    made.sent, made.faults, put = [], {}, MemoryFileSystem.put_file

    def put_file(self, source, to, **options):
        name = to.rpartition("/")[2]
        if fault := made.faults.get(name):
            raise fault
        made.sent.append(name)
        put(self, source, to, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    for name in ("rm", "_rm"):
        monkeypatch.setattr(MemoryFileSystem, name, lambda *_, **__: pytest.fail("something was deleted there"))
    yield made
    made.store.clear()


ALL_SENT = ["rank_0.safetensors", "run.log", "manifest.json", "manifest.json"]


@pytest.fixture
def results(tmp_path):
    """Make a run's folder: a complete checkpoint, one that is being written, a log, and files that are never sent."""
    folder = tmp_path / "outputs"
    whole = ("manifest.json", "critic/manifest.json", "rank_0.safetensors")
    for name in (*(f"global_step_1/{name}" for name in whole), "global_step_2/rank_0.safetensors", "run.log", ".lock"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "b.json.0a0a0a0a.partial").write_text("half")
    (folder / "link").symlink_to("/etc/hostname")
    return folder


@pytest.fixture(autouse=True)
def logged(caplog):
    caplog.set_level("INFO")
    return caplog


@pytest.fixture
def sent(logged):
    def sent(folder, to="memory://t/j"):
        """Upload and return (whether all is there, the log)."""
        logged.clear()
        return upload.send_files(folder, to), logged.text.partition("/j: ")[2]

    return sent


def test_whole_files_are_sent_once_and_one_of_another_size_again(store, results, sent):
    """Check that the manifest of a checkpoint, which makes its copy complete, is sent last."""
    assert sent(results) == (True, "4 files sent (0.0 MB)\n")
    assert store.sent == ALL_SENT
    names = ("rank_0.safetensors", "critic/manifest.json", "manifest.json")
    copies = [f"/t/j/global_step_1/{name}" for name in names]
    assert set(store.store) == {*copies, "/t/j/run.log"}
    assert [name for name in store.store if name in copies] == copies
    assert "0 files sent" in sent(results)[1] and len(store.sent) == 4
    store.pipe_file("/t/j/run.log", b"half")  # cut off
    assert sent(results)[1].startswith("1 files") and store.cat_file("/t/j/run.log") == b"run.log"
    (results / "run.log").unlink()
    assert sent(results)[0] and store.cat_file("/t/j/run.log") == b"run.log"  # nothing is removed there


def test_a_store_that_fails_is_named_without_secrets_and_the_next_call_sends_the_rest(
    store, results, monkeypatch, sent
):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s3cret-value")
    store.faults = {"manifest.json": PermissionError("denied to s3cret-value\n here")}
    whole, found = sent(results)
    assert (whole, found[:12]) == (False, "2 files sent")
    assert "some were not sent: PermissionError: denied to $AWS_SECRET_ACCESS_KEY here" in found
    store.faults = {}
    assert sent(results)[0] and store.sent == ALL_SENT
    assert "absent: expected a file or a folder" in sent(results / "absent", "memory://t/x/j")[1]


def make_job(tmp_path, line, to, **more):
    given = {"checkout": str(tmp_path), "command": ["bash", "-c", line], **more}
    return Job(**JOB, **given, python=sys.executable, uploads=[{"from": "outputs", "to": to}])


def run(job):
    """Run the job's command as node.sh does and return (exit code, output)."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(upload.command_words(job), cwd=job.checkout, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout


WORK = "mkdir -p outputs/saved; echo w > outputs/saved/w; echo l > outputs/log; echo ended; exit {}"


def test_a_failed_upload_does_not_end_the_command_and_is_its_exit_code(tmp_path):
    (tmp_path / "to").write_text("no folder")
    code, out = run(make_job(tmp_path, WORK.format(0), f"file://{tmp_path}/to"))
    assert code == 1 and out.index("ended") < out.index("some were not sent") and "the command ended with 0" in out
    (tmp_path / "to").unlink()
    again = shlex.split(out.partition("To send them: ")[2].splitlines()[0])
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(again, capture_output=True, text=True, cwd=tmp_path, env=env, check=True)
    assert "2 files sent" in done.stdout
    assert (tmp_path / "to/j/saved/w").exists()
    assert run(make_job(tmp_path, WORK.format(3), f"file://{tmp_path}/to"))[0] == 3


def test_the_command_ends_by_a_signal_with_its_code_and_with_its_uploader(tmp_path):
    words = upload.command_words(make_job(tmp_path, "echo $$ > pid; sleep 600 & wait", f"file://{tmp_path}/to"))
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


@pytest.mark.parametrize("to", ["s4://bucket/x", "file://{}/to"])
def test_a_target_that_no_package_can_write_is_refused_before_the_command(tmp_path, to):
    code, out = run(make_job(tmp_path, WORK.format(0), to.format(tmp_path)))
    assert (code, "ended" in out) == ((2, False) if to.startswith("s4") else (0, True))
    assert ("s4; nothing was started" in out) == (code == 2)


def test_the_command_line_needs_no_fsspec():
    code = "import sys; sys.modules['fsspec'] = None; import verl_patches.__main__"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
