"""Test heartbeats of real processes, and their node's view of those that are stopped, hang, or have died."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.conftest import ROOT
from tests.ranks import HANG_S
from verl_patches.heartbeat import heartbeat, node
from verl_patches.heartbeat.calls import record_and_call
from verl_patches.heartbeat.heartbeat import BEAT_SUFFIX, Beat, Heartbeat, ranks_text, read_beat
from verl_patches.heartbeat.node import close, read_processes, stacks
from verl_patches.processes import process_state, start_ticks


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return start(rank, work) -> pid of a process in phase update of update_actor; kill all at the end."""
    monkeypatch.setattr(node, "STACK_S", HANG_S)  # a busy machine may need longer than a run allows
    started = []

    def run(rank, work):
        command = [sys.executable, "-m", "tests.launch.supervise.processes", str(tmp_path), str(rank), work]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, cwd=ROOT, **streams))
        started[-1].stdout.readline()
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def wait_until(true):
    """Wait until `true()` returns true."""
    deadline = time.monotonic() + HANG_S
    while not true():
        assert time.monotonic() < deadline, f"no change within {HANG_S} s"
        time.sleep(0.1)


def single_process(folder):
    (seen,) = read_processes(folder)
    return seen


def test_a_process_says_where_it_is_and_goes_on_beating(start, tmp_path):
    process = start(3, "waits")
    seen = single_process(tmp_path)
    assert (seen.beat.name, seen.beat.rank, seen.beat.pid) == ("rank 3", 3, process.pid)
    assert (seen.beat.call, seen.beat.phase, seen.beat.place) == ("update_actor", "update", "update_actor update")
    assert seen.beat.longest_s.keys() == {"compute_log_prob", "compute_log_prob old_log_prob", "update_actor"}
    assert seen.state in "SRD" and seen.where.startswith(f"rank 3 (pid {process.pid} on ")
    wait_until(lambda: single_process(tmp_path).beat.at_s > seen.beat.at_s + heartbeat.BEAT_S)
    assert single_process(tmp_path).in_place_s > heartbeat.BEAT_S


def test_a_process_that_holds_the_gil_is_silent_and_gives_its_stacks(start, tmp_path):
    start(1, "holds_the_gil")
    wait_until(lambda: single_process(tmp_path).silent_s > 3 * heartbeat.BEAT_S)
    assert single_process(tmp_path).state == "S" and "in holds_the_gil" in stacks(tmp_path, ["rank 1"])["rank 1"]


def test_a_process_that_has_died_is_gone(start, tmp_path):
    os.kill(start(1, "waits").pid, signal.SIGKILL)
    wait_until(lambda: single_process(tmp_path).state == "gone")
    assert "has ended" in stacks(tmp_path, ["rank 1"])["rank 1"] and close(tmp_path, failed=True) == []
    assert not tmp_path.exists()
    assert process_state(os.getpid(), start_ticks(os.getpid()) + 1) == "gone"  # the pid belongs to another process now


def test_the_end_kills_stopped_processes_too_and_no_others(start, tmp_path):
    first, second, other = start(0, "waits"), start(1, "waits"), start(2, "waits")
    os.kill(second.pid, signal.SIGSTOP)
    wait_until(lambda: "T" in [seen.state for seen in read_processes(tmp_path)])
    (tmp_path / "rank_2.beat").unlink()  # its process counts as one of another run
    assert close(tmp_path, failed=True) == []
    assert [first.poll(), second.poll(), other.poll()] == [-signal.SIGKILL, -signal.SIGKILL, None]  # it has waited
    assert not tmp_path.exists()


@pytest.mark.parametrize("looks", [3, 4])
def test_the_end_waits_for_killed_processes_at_most_its_limit(start, tmp_path, monkeypatch, looks):
    """Let SIGKILL take its time, as a process with pinned memory does; each look takes a third of the limit."""
    process, kill, clock = start(0, "waits"), os.kill, SimpleNamespace(now=0.0, looks=0)

    def sleep(seconds):
        clock.now, clock.looks = clock.now + node.FREE_S / 3, clock.looks + 1
        if clock.looks == looks:
            kill(process.pid, signal.SIGKILL)
            process.wait(HANG_S)

    monkeypatch.setattr(node, "os", SimpleNamespace(kill=lambda pid, number: None))
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: clock.now, sleep=sleep))
    left = close(tmp_path, failed=True)
    assert clock.looks == 3 and not tmp_path.exists()
    assert [name.partition(" (")[0] for name in left] == ([] if looks == 3 else ["rank 0"])


def test_a_zombie_whose_threads_run_has_not_ended(start, tmp_path):
    process = start(0, "leaves_a_thread")
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert process_state(process.pid, start_ticks(process.pid)) == "Z"
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: process_state(process.pid, start_ticks(process.pid)) == "gone")


def test_the_end_of_a_run_that_went_well_kills_nothing(start, tmp_path):
    process = start(0, "waits")
    assert close(tmp_path, failed=False) == [] and process.poll() is None and not tmp_path.exists()


FULL_DISK = """
import resource, sys
from pathlib import Path
from verl_patches.heartbeat import heartbeat
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # a limit on file sizes: allocation fails as on a full disk
heartbeat.current_heartbeat().start(Path(sys.argv[1]), "rank 8", 8)
with heartbeat.current_heartbeat().in_call("update_actor"):
    print("goes on")
"""


def test_with_a_full_disk_there_is_no_heartbeat_and_the_process_goes_on(tmp_path, run_python):
    done = run_python(FULL_DISK, str(tmp_path)).check()
    assert done.out == "goes on\n" and "rank 8 has no heartbeat" in done.err and str(tmp_path) in done.err


def test_a_damaged_record_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(Heartbeat, "_write_beats", lambda self: None)  # one record only
    Heartbeat().start(tmp_path, "rank 0", 0)
    (file,) = tmp_path.glob(f"*{BEAT_SUFFIX}")
    assert isinstance(read_beat(file), Beat)
    data = file.read_bytes()
    file.write_bytes(data.replace(b'"pid"', b'"pie"'))
    assert read_beat(file) is None and read_beat(tmp_path / "none") is None
    monkeypatch.setattr(heartbeat.time, "sleep", lambda seconds: file.write_bytes(data))
    assert isinstance(read_beat(file), Beat)  # the writer finished during the retry
    assert file.stat().st_size == heartbeat.FILE_BYTES  # all blocks are allocated at the start


@pytest.mark.parametrize(("method", "meta", "place"), [
    ("generate_sequences", {"validate": True}, "validate"),
    ("generate_sequences", {"do_sample": False}, "generate_sequences"),  # a greedy baseline takes as long as a rollout
    ("update_actor", {"validate": True}, "update_actor"),
])  # fmt: skip
def test_a_rank_that_validates_is_in_a_place_of_its_own(tmp_path, method, meta, place):
    def called(self, prompts):
        return record_and_call(lambda: single_process(tmp_path).beat.place, (), {})  # a call inside has no place

    worker = type("Worker", (), {method: called})()
    with heartbeat._heartbeat.set(Heartbeat()) as own:
        own.start(tmp_path, "rank 0", 0)
        assert record_and_call(called, (worker, SimpleNamespace(meta_info=meta)), {}) == place
        assert single_process(tmp_path).beat.longest_s.keys() == {place}


def test_ranks_of_a_group_are_short():
    texts = {"0-255": range(256), "3-227:32": range(3, 256, 32), "1,5": [5, 1], "0,1,3": [0, 1, 3], "4": [4]}
    assert [ranks_text(ranks) for ranks in texts.values()] == list(texts)
