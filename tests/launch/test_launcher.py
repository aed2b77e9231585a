"""Test the launcher with real child processes: how runs end, exit codes, and that only the run's processes end."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.drivers import DETACHED, FOLDER, MEASURED, NAME, SLEEP, STEP, SUMMARY
from tests.ranks import HANG_S
from verl_patches.errors import interruption_text
from verl_patches.launch import launcher
from verl_patches.run.environment import REPOSITORY

pytestmark = pytest.mark.slow  # each starts processes

# the watch's error, which the driver raises after the controller has written why it ended itself
RAISE_LOST_NODE = "raise type('LostNodeError', (Exception,), {})('node a is lost')"


def is_running(folder, name="child.pid"):
    return psutil.pid_exists(int((folder / name).read_text()))


def test_a_good_run_has_progress_lines_memory_of_all_processes_and_a_record(start, monkeypatch):
    """Start two children that hold 100 MB each; the shell's own Ray must not be joined."""
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    code = f"""{SUMMARY}
assert 'RAY_ADDRESS' not in os.environ
(out / "progress.log").write_text("| one\\n| two\\n")
grow = "import time; x = bytearray(100_000_000); print('on', flush=True); time.sleep(600)"
children = [subprocess.Popen([sys.executable, "-c", grow], stdout=subprocess.PIPE) for _ in range(2)]
for child in children: child.stdout.readline()
{MEASURED}"""
    outcome, summary, lines = start(code)
    assert (outcome.code, outcome.reason, summary["exit"], summary["steps"]) == (0, "ok", "ok", [STEP])
    assert lines == ["| one", "| two"]
    assert 200_000_000 < summary["peak_rss_bytes"]["total"] < 500_000_000
    names = {v["name"] for v in json.loads((outcome.folder / "environment.json").read_text())}
    assert {"VERL_PATCHES", "VLLM_USE_V1", "RAY_TMPDIR"} <= names
    assert not (outcome.folder / "ray_logs").exists()


def test_modified_sources_are_in_the_record_and_above_the_step_table(start):
    code = SUMMARY + '(out / "progress.log").open("a").write("| step 1\\n")'
    outcome, summary, lines = start(code, dirty={"verl": ["verl/a.py (modified)"]}, drift="warn")
    assert summary["dirty"] == {"verl": ["verl/a.py (modified)"]} and outcome.code == 0
    text = "verl is not as pinned (drift=warn): 1 file changed: verl/a.py (modified)"
    assert text in lines[0] and lines[1] == "| step 1"


@pytest.mark.parametrize(
    ("code", "exit_code", "reason"),
    [
        ("raise ValueError('a: expected 2, found 3\\n  do this')", 1, "ValueError: a: expected 2, found 3\n  do this"),
        (SUMMARY.replace('"ok"', '"2 workers died"') + RAISE_LOST_NODE, 1, "LostNodeError: node a is lost"),
        ("raise SystemExit('no such device')", 1, "no traceback and ends with: no such device"),
        ("pass", 1, "before it had completed its summary"),
        ("import os; os.kill(os.getpid(), 9)", 128 + 9, "SIGKILL"),
    ],
)
def test_a_driver_that_fails_gives_code_reason_and_a_valid_summary(start, code, exit_code, reason):
    outcome, summary, _ = start(code)
    assert outcome.code == exit_code and reason in outcome.reason == summary["exit"]
    assert summary["layout"]["train"] == "tp1 ep2 @2" and summary["steps"] in ([], [STEP])


@pytest.mark.parametrize("key", [None, "wall_s", "quiet_s"])
def test_detached_daemons_of_a_driver_that_ends_or_hangs_are_ended_and_nothing_else(start, tmp_path, key):
    pid = tmp_path / "t/0001" / "child.pid"

    def until_it_is_up(line):
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.01)

    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        timeouts = {"wall_s": None, "quiet_s": None, **({key: 0.1} if key else {})}
        code = DETACHED + (SLEEP if key else SUMMARY)
        outcome, summary, _ = start(code, on_line=until_it_is_up, timeouts=timeouts)
        assert outcome.code == (launcher.TIMED_OUT if key else 0) and (key or "ok") in summary["exit"]
        assert not is_running(outcome.folder) and bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_an_error_of_the_launcher_itself_leaves_nothing_running(start, tmp_path):
    def broken(line):
        if line:  # "" says only that the launcher has looked
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        start(f"{DETACHED}(out / 'progress.log').write_text('| x\\n')\n{SLEEP}", on_line=broken)
    assert not is_running(tmp_path / "t/0001")


def test_the_temporary_folder_is_removed_and_ray_logs_are_copied(start):
    code = f"""{FOLDER}
logs = Path(os.environ["RAY_TMPDIR"]) / "session_2025-01-01_00-00-00_0_1" / "logs"
logs.mkdir(parents=True); (logs / "raylet.err").write_text("it broke"); (logs / "empty.out").touch()
(out / "where").write_text(os.environ["RAY_TMPDIR"]); raise SystemExit(2)
"""
    outcome, _, _ = start(code)
    assert [(f.name, f.read_text()) for f in (outcome.folder / "ray_logs").iterdir()] == [("raylet.err", "it broke")]
    temp = Path((outcome.folder / "where").read_text())
    assert not temp.exists() and len(str(temp)) < 40


def signalled(tmp_path, act, hang_up="SIG_DFL"):
    """Return a program whose launcher does `act` once its driver runs, and prints at every look at the clock."""
    folder = tmp_path / "t/0001"
    pids = """
(out / "temp").write_text(os.environ["TMPDIR"])
(out / "new").write_text(str(os.getpid()))
(out / "new").rename(out / "driver.pid")
"""
    return f"""
import signal, sys, threading, os, time
from verl_patches import processes
from verl_patches.launch import launcher
from tests.runs import composed
processes.TERM_S = 0.5
signal.signal(signal.SIGHUP, signal.{hang_up})
overrides = ["recipe.output_root={tmp_path}", "recipe.run=t"]
def act():
    while not os.path.exists({str(folder / "driver.pid")!r}): time.sleep(0.05)
    {act}
threading.Thread(target=act, daemon=True).start()
child = {DETACHED + pids + SLEEP!r}
launcher.driver_command = lambda *_: [sys.executable, "-c", child]
outcome = launcher.run(composed({NAME!r}, overrides), lambda line: print(line, flush=True))
print(outcome.reason, file=sys.stderr, flush=True)
sys.exit(outcome.code)
"""


SIGNALS = [(signal.SIGINT, 130), (signal.SIGKILL, -9)]  # SIGHUP and SIGTERM have tests of their own below


@pytest.mark.parametrize(("number", "code"), SIGNALS)
def test_signals_to_the_launcher(run_python, tmp_path, number, code):
    folder = tmp_path / "t/0001"
    done = run_python(signalled(tmp_path, f"os.kill(os.getpid(), {int(number)})"))
    assert done.rc == code, done.err
    if number == signal.SIGKILL:  # the driver ends with its launcher, and Ray's daemons with the driver
        while is_running(folder, "driver.pid"):
            time.sleep(0.05)
        psutil.Process(int((folder / "child.pid").read_text())).kill()  # this test's own, ignores SIGTERM
        shutil.rmtree((folder / "temp").read_text(), ignore_errors=True)
    else:
        assert json.loads((folder / "summary.json").read_text())["exit"] == interruption_text(number)
        assert not is_running(folder)
    assert not is_running(folder, "driver.pid")


def test_a_run_outlives_its_terminal_under_nohup_alone(run_python, tmp_path):
    both = "for number in (signal.SIGHUP, signal.SIGTERM): os.kill(os.getpid(), number); time.sleep(1)"
    assert run_python(signalled(tmp_path, both, "SIG_IGN")).rc == 143


def test_a_run_whose_terminal_closes_is_ended_with_its_reason(tmp_path):
    """Check this because writing to that terminal fails from then on."""
    ours, its = os.openpty()
    program = [sys.executable, "-c", signalled(tmp_path, "pass")]

    def take_terminal():
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams = {"stdin": its, "stdout": its, "stderr": its, "cwd": REPOSITORY}
    process = subprocess.Popen(program, **streams, start_new_session=True, preexec_fn=take_terminal)
    os.close(its)
    while not (tmp_path / "t/0001" / "driver.pid").exists():
        assert process.poll() is None, os.read(ours, 1 << 16)
        time.sleep(0.1)
    os.close(ours)
    assert process.wait(HANG_S) == 129
    assert json.loads((tmp_path / "t/0001" / "summary.json").read_text())["exit"] == interruption_text(signal.SIGHUP)
    assert not is_running(tmp_path / "t/0001") and not is_running(tmp_path / "t/0001", "driver.pid")


def test_shared_memory_that_a_killed_process_left_is_removed(start, tmp_path):
    code = f"""{SUMMARY}
hold = '''
import time
from multiprocessing import resource_tracker, shared_memory
block = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(block._name, "shared_memory")
print(block.name, flush=True)
time.sleep(60)
'''
child = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
(out / "block").write_text(child.stdout.readline().strip())
{MEASURED}child.kill()
"""
    outcome, *_ = start(code)
    name = (tmp_path / "t/0001" / "block").read_text()
    assert outcome.code == 0 and name.startswith("psm_") and not Path("/dev/shm", name).exists()
