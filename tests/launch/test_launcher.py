"""The supervisor against real child processes: endings, exit codes, clean-up of all that was started, and only that."""

import fcntl
import functools
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from verl_patches.__main__ import app
from verl_patches.config.compose import compose
from verl_patches.errors import ConfigError
from verl_patches.launch import launcher

pytestmark = pytest.mark.slow  # each starts processes, or plans 256 ranks

NAME = "grpo_deepseekv3_tiny_cpu"
FOLDER = "import os; from pathlib import Path; out = Path(os.environ['TENSORBOARD_DIR']).parent\n"
STEP = {"step": 1, "reward": 0.5, "seconds": {"rollout": 1.0}}
SUMMARY = (
    FOLDER
    + f"""
import json
(out / "summary.json").write_text(json.dumps({{"run": "t", "steps": [{STEP}], "exit": "ok"}}))
"""
)
# a daemon as Ray makes them: a session of its own, its parent gone, deaf to SIGTERM
DETACHED = (
    FOLDER
    + """
import subprocess, sys
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
(out / "child.pid").write_text(str(child.pid))
"""
)


BOOKKEEPING = """
(out / "driver.pid").write_text(str(os.getpid()))
(out / "temp").write_text(os.environ["TMPDIR"])
"""


@functools.cache
def composed():
    return compose(NAME)


@pytest.fixture
def start(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("verl_patches.processes.TERM_S", 0.5)
    monkeypatch.setattr(launcher, "MEMORY_S", 0.2)  # short runs must be seen on a busy machine too

    def run(code: str, on_line=None, dirty=None, **recipe):
        lines: list[str] = []
        config = composed().copy()
        config.recipe.update({"output_root": str(tmp_path), "run": "t", **recipe})
        monkeypatch.setattr(launcher, "driver_command", lambda *_: [sys.executable, "-c", code])
        outcome = launcher.run(config, NAME, [], on_line or lines.append, None, dirty)
        return outcome, json.loads((tmp_path / "t" / "summary.json").read_text()), lines

    return run


def test_a_good_run(start):
    code = (
        SUMMARY
        + """
import time
(out / "progress.log").write_text("| one\\n| two\\n")
x = bytearray(50_000_000)
time.sleep(1.2)
"""
    )
    outcome, summary, lines = start(code)
    assert (outcome.code, outcome.reason, summary["exit"], summary["steps"]) == (0, "ok", "ok", [STEP])
    assert lines == ["| one", "| two"]
    assert 50_000_000 < summary["peak_pss_bytes"]["total"] < 200_000_000
    names = {v["name"] for v in json.loads((outcome.folder / "environment.json").read_text())}
    assert {"VERL_PATCHES", "VLLM_USE_V1", "RAY_TMPDIR"} <= names
    assert not (outcome.folder / "ray_logs").exists()


def test_a_dirty_run_says_so_in_its_record_and_above_the_table(start):
    code = SUMMARY + '(out / "progress.log").open("a").write("| step 1\\n")'
    outcome, summary, lines = start(code, dirty={"verl": ["verl/a.py (modified)"]}, drift="warn")
    assert summary["dirty"] == {"verl": ["verl/a.py (modified)"]} and outcome.code == 0
    said = "verl is not as pinned (drift=warn): 1 file changed: verl/a.py (modified)"
    assert said in lines[0] and lines[1] == "| step 1"
    shown = CliRunner().invoke(app, ["status", "--run", str(outcome.folder)])
    assert "no recorded states" in str(shown.exception)  # it died before any row was proven
    summary["patches"] = [{"id": "a.b", "state": "active", "target": "m:f", "process": "controller"}]
    (outcome.folder / "summary.json").write_text(json.dumps(summary))
    assert (
        "dirty: verl was not as pinned: verl/a.py (modified)"
        in CliRunner().invoke(app, ["status", "--run", str(outcome.folder)]).stdout
    )


def test_a_driver_that_dies_names_its_error(start):
    code = "import sys; print('noise'); raise ValueError('what: expected 2, found 3\\n  do this')"
    outcome, summary, _ = start(code)
    assert outcome.code == 1
    assert summary["exit"] == outcome.reason == "ValueError: what: expected 2, found 3\n  do this"
    assert summary["layout"]["train"] == "tp1 ep2 @2" and summary["steps"] == []  # valid though the driver wrote none


def test_a_run_that_says_ok_but_exits_badly_is_not_ok(start):
    outcome, summary, _ = start(SUMMARY + "raise SystemExit(3)")
    assert outcome.code == 3 and summary["exit"] != "ok"


def test_exit_zero_without_a_summary_is_an_error(start):
    outcome, summary, _ = start("pass")
    assert outcome.code == 1 and "without finishing" in summary["exit"]


def test_a_killed_driver(start):
    outcome, summary, _ = start("import os; os.kill(os.getpid(), 9)")
    assert outcome.code == 128 + 9 and "SIGKILL" in summary["exit"]


@pytest.mark.parametrize("key", ["wall_s", "quiet_s"])
def test_a_hanging_driver_is_ended(start, key):
    began = time.monotonic()
    timeouts = {"wall_s": None, "quiet_s": None, key: 3.0}
    outcome, summary, _ = start(DETACHED + "import time; time.sleep(600)", timeouts=timeouts)
    assert outcome.code == launcher.TIMED_OUT and key in summary["exit"]
    assert time.monotonic() - began < 30
    assert not psutil.pid_exists(int((outcome.folder / "child.pid").read_text()))


def test_detached_daemons_are_ended_too_and_nothing_else(start, tmp_path):
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        outcome, _, _ = start(DETACHED + SUMMARY)
        assert outcome.code == 0
        assert not psutil.pid_exists(int((outcome.folder / "child.pid").read_text()))
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_an_error_of_the_launcher_itself_leaves_nothing_running(start, tmp_path):
    code = DETACHED + "import time; (out / 'progress.log').write_text('| x\\n'); time.sleep(600)"

    def broken(line):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        start(code, on_line=broken)
    assert not psutil.pid_exists(int((tmp_path / "t" / "child.pid").read_text()))


def test_the_temporary_folder_goes_and_ray_logs_stay(start):
    code = (
        FOLDER
        + """
logs = Path(os.environ["RAY_TMPDIR"]) / "session_2025-01-01_00-00-00_0_1" / "logs"
logs.mkdir(parents=True); (logs / "raylet.err").write_text("it broke"); (logs / "empty.out").touch()
(out / "where").write_text(os.environ["RAY_TMPDIR"]); raise SystemExit(2)
"""
    )
    outcome, _, _ = start(code)
    assert (outcome.folder / "ray_logs" / "raylet.err").read_text() == "it broke"
    assert not (outcome.folder / "ray_logs" / "empty.out").exists()
    temp = Path((outcome.folder / "where").read_text())
    assert not temp.exists() and len(str(temp)) < 40


def test_a_second_run_replaces_outputs_only(start, tmp_path):
    start(SUMMARY)
    (tmp_path / "t" / "notes.txt").write_text("mine")
    _, summary, _ = start("raise RuntimeError('no')")
    assert summary["steps"] == [] and (tmp_path / "t" / "notes.txt").exists()


def test_the_callers_ray_address_does_not_leak(start, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    outcome, _, _ = start(SUMMARY + "assert 'RAY_ADDRESS' not in os.environ")
    assert outcome.code == 0


def test_a_taken_port_is_refused_before_anything_starts(start, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"{port}, which is taken"):
            start(SUMMARY, ray_port=port)
    assert not (tmp_path / "t").exists()
    outcome, _, _ = start(SUMMARY + f"assert os.environ['RAY_GCS_SERVER_PORT'] == '{port}'", ray_port=port)
    assert outcome.code == 0  # free again


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=SLOW), pytest.param(signal.SIGKILL, -9, marks=SLOW)],
)
def test_signals_to_the_launcher(run_python, tmp_path, number, code):
    launcher = f"""
import sys, threading, os, time
from verl_patches import processes
from verl_patches.launch import launcher
from verl_patches.config.compose import compose
processes.TERM_S = 0.5
overrides = ["recipe.output_root={tmp_path}", "recipe.run=t"]
def interrupt():
    while not os.path.exists({str(tmp_path / "t" / "temp")!r}): time.sleep(0.05)
    time.sleep(0.2); os.kill(os.getpid(), {int(number)})
threading.Thread(target=interrupt, daemon=True).start()
child = {DETACHED + BOOKKEEPING + "import time; time.sleep(600)"!r}
launcher.driver_command = lambda *_: [sys.executable, "-c", child]
sys.exit(launcher.run(compose({NAME!r}, overrides), {NAME!r}, overrides).code)
"""
    done = run_python(launcher, timeout_s=30)
    assert done.rc == code, done.err
    driver, child = (int((tmp_path / "t" / name).read_text()) for name in ("driver.pid", "child.pid"))
    if number == signal.SIGKILL:  # the driver dies with its launcher, and Ray's daemons with the driver
        deadline = time.monotonic() + 5
        while psutil.pid_exists(driver) and time.monotonic() < deadline:
            time.sleep(0.05)
        psutil.Process(child).kill()  # this test's own, deaf to SIGTERM
        Path((tmp_path / "t" / "temp").read_text()).rmdir()
    else:
        assert "interrupted by" in json.loads((tmp_path / "t" / "summary.json").read_text())["exit"]
        assert not psutil.pid_exists(child)
    assert not psutil.pid_exists(driver)


def test_memory_of_all_processes_is_added_up(start):
    """Two children of 100 MB each, held for 2 s."""
    code = (
        SUMMARY
        + """
import subprocess, sys, time
grow = "import time; x = bytearray(100_000_000); time.sleep(2)"
for child in [subprocess.Popen([sys.executable, "-c", grow]) for _ in range(2)]: child.wait()
"""
    )
    outcome, summary, _ = start(code)
    assert outcome.code == 0 and summary["peak_pss_bytes"]["total"] > 200_000_000


def test_a_folder_that_another_run_writes_is_refused(start, tmp_path):
    (tmp_path / "t").mkdir()
    with (tmp_path / "t" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match=r"being written by another run.*--run NAME"):
            start(SUMMARY)


def test_shared_memory_that_a_killed_process_left_is_removed(start, tmp_path):
    code = (
        SUMMARY
        + BOOKKEEPING
        + """
import signal, sys, subprocess, time
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
time.sleep(1)
child.kill()
"""
    )
    outcome, *_ = start(code)
    name = (tmp_path / "t" / "block").read_text()
    assert outcome.code == 0 and name.startswith("psm_") and not Path("/dev/shm", name).exists()
