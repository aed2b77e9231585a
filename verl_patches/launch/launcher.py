"""Start a run's driver as a child, supervise it, end all its processes, and write a valid summary.json in any case."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_patches.config import environment
from verl_patches.errors import ConfigError
from verl_patches.evaluation.plots import draw_memory, plot_run
from verl_patches.launch.plan import driver_command
from verl_patches.layout.parallel import rollout_layout_of, train_layout_of
from verl_patches.processes import Descendants, MemoryWatch, adopting_orphans, die_with_parent
from verl_patches.trainer.recording import find_recording
from verl_patches.trainer.summary import Progress, write_json
from verl_patches.upstream.checkouts import Trees, commit_of
from verl_patches.upstream.modified import files_text

POLL_S, MEMORY_S = 0.2, 1.0
TIMED_OUT = 124  # as timeout(1)
SOCKET_PATH_BYTES = 107
_RAY_SOCKET = "/session_2025-01-01_00-00-00_000000_0000000/sockets/plasma_store"
# what a run leaves in its folder, written by launcher and driver; the next run of that name removes these, nothing else
OUTPUTS = (
    "config.yaml",
    "environment.json",
    "driver.log",
    "progress.log",
    "summary.json",
    "tensorboard",
    "training.png",
    "memory.png",
    "rollouts",
    "ray_logs",
)
_LOG_END_BYTES = 256 << 10
_RAY_LOG_BYTES = 4 << 20  # of each of Ray's log files, its end
_PREFIX = re.compile(r"^\([^()]*pid=\d+[^()]*\)\s?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(
    r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Died|Timeout))(?:\(\w+\))?(?::|$)"
)
_WRAPPER = "RayTaskError"


@dataclass
class Outcome:
    """How a run ended: exit code, "ok" or the reason, its folder, seconds, peak memory by process."""

    code: int
    reason: str
    folder: Path
    wall_s: float
    peak_pss_bytes: dict[str, int] = field(default_factory=dict)


def run(
    config: DictConfig,
    config_name: str,
    overrides: Sequence[str],
    on_line: Callable[[str], None] = lambda line: None,
    trees: Trees | None = None,
    dirty: Mapping[str, Sequence[str]] | None = None,
) -> Outcome:
    """Run the driver of `config` to its end and return the outcome; the driver's progress lines go to `on_line`.

    Writes <output_root>/<run>/: config.yaml, environment.json, driver.log, and after the driver summary.json
    (peak_pss_bytes and exit filled in), plots, and on failure ray_logs/. `dirty`: {repository or package: files} that
    are not as pinned (upstream/modified.py); the summary and a line above the step table have them. Raises ConfigError
    before anything starts. All processes that the run started are ended before this returns, and its temporary folder
    is removed.
    """
    require_free_port(config.recipe.ray_port)
    _check_replay(config)
    with _locked(environment.run_dir(config)) as folder:
        _remove_outputs(folder)
        for name, files in (dirty or {}).items():
            Progress(folder).say(f"| dirty: {name} is not as pinned (drift={config.recipe.drift}): {files_text(files)}")
        started, watch = time.monotonic(), MemoryWatch()
        code, reason = _run_driver(config, driver_command(config_name, overrides), folder, watch, on_line, trees)
        wall_s = round(time.monotonic() - started, 1)
        head = {**_head(config), **_commits(trees), **({"dirty": dict(dirty)} if dirty else {}), "wall_s": wall_s}
        code, reason = write_summary(folder, code, reason, head, watch.peaks())
        summary = json.loads((folder / "summary.json").read_text())
        if summary["steps"]:
            plot_run(summary, folder / "training.png")
        if any(step.get("memory") for step in summary["steps"]):
            draw_memory(summary, folder / "memory.png")
        return Outcome(code, reason, folder, wall_s, watch.peaks())


def _run_driver(
    config: DictConfig,
    command: list[str],
    folder: Path,
    watch: MemoryWatch,
    on_line: Callable[[str], None],
    trees: Trees | None,
) -> tuple[int, str | None]:
    """Run the driver, then end all processes that it started; (exit code, reason or None) as `_supervise` has them."""
    temp = short_temp_dir()
    try:
        variables = environment.derive(config, str(temp), trees)
        OmegaConf.save(config, folder / "config.yaml")
        (folder / "environment.json").write_text(json.dumps([asdict(v) for v in variables], indent=1) + "\n")
        env = environment.process_environment(variables, os.environ)
        with adopting_orphans(), _Signals() as signals:
            descendants = Descendants()
            try:
                with (folder / "driver.log").open("ab") as out:
                    driver = subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=die_with_parent,
                    )
                descendants.waited_for = frozenset({driver.pid})
                code, reason = _supervise(driver, config.recipe.timeouts, folder, descendants, watch, signals, on_line)
            finally:
                descendants.end_all()
        if code:
            copy_ray_logs(temp, folder / "ray_logs")
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    return code, reason


def _supervise(
    driver: subprocess.Popen,
    timeouts: DictConfig,
    folder: Path,
    descendants: Descendants,
    watch: MemoryWatch,
    signals: _Signals,
    on_line: Callable[[str], None],
) -> tuple[int, str | None]:
    """Wait until the driver ends, or end it; (exit code, reason or None where neither launcher nor log has one)."""
    progress = _NewLines(folder / "progress.log", on_line)
    quiet = _Quiet(folder / "driver.log", folder / "progress.log")
    start = next_memory = time.monotonic()
    reason = None
    while (code := driver.poll()) is None:
        now = time.monotonic()
        progress.read()
        if now >= next_memory:
            alive = descendants.alive()
            watch.look(alive)
            descendants.shared.look(alive)
            next_memory = max(now, next_memory) + MEMORY_S
        if signals.received:
            code, reason = 128 + signals.received, f"interrupted by {signal.Signals(signals.received).name}"
            break
        if timeouts.wall_s is not None and now - start > timeouts.wall_s:
            code, reason = TIMED_OUT, f"still running after {timeouts.wall_s:g} s (recipe.timeouts.wall_s)"
            break
        if timeouts.quiet_s is not None and quiet.seconds() > timeouts.quiet_s:
            code, reason = TIMED_OUT, f"no output for {timeouts.quiet_s:g} s (recipe.timeouts.quiet_s)"
            break
        time.sleep(POLL_S)
    _end_driver(driver)
    progress.read()
    if reason is None and code:
        reason = last_error(folder / "driver.log")  # before other processes write what ending them causes
        if code < 0:
            reason = f"driver ended by {signal.Signals(-code).name}" + (f"; last error: {reason}" if reason else "")
            code = 128 - code
    return code, reason


def _end_driver(driver: subprocess.Popen) -> None:
    """End the driver first, so that it cannot start more processes while its descendants are ended."""
    if driver.poll() is None:
        driver.terminate()
        try:
            driver.wait(5)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


class _Signals:
    """Records SIGINT and SIGTERM instead of dying of them, so that all processes can be ended (main thread only)."""

    received: int = 0

    def __enter__(self) -> _Signals:
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, _frame: Any) -> None:
        self.received = self.received or number

    def __exit__(self, *_: object) -> None:
        if self._main:
            for number, handler in self._before.items():
                signal.signal(number, handler)


class _NewLines:
    """Passes each new complete line of a growing file to `on_line`."""

    def __init__(self, path: Path, on_line: Callable[[str], None]):
        self.path, self.on_line, self.offset = path, on_line, 0

    def read(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            *lines, rest = file.read().split(b"\n")
        self.offset += sum(len(line) + 1 for line in lines)
        for line in lines:
            self.on_line(line.decode(errors="replace"))


class _Quiet:
    """Seconds since any of the files grew."""

    def __init__(self, *paths: Path):
        self.paths, self.size, self.since = paths, -1, time.monotonic()

    def seconds(self) -> float:
        size = sum(path.stat().st_size for path in self.paths if path.exists())
        if size != self.size:
            self.size, self.since = size, time.monotonic()
        return time.monotonic() - self.since


def require_free_port(port: int | None) -> None:
    """ConfigError if something listens on `port` of this machine; None is always fine."""
    if port is None:
        return
    for address in ("127.0.0.1", ""):
        try:
            with socket.create_server((address, port)):
                pass
        except OSError as error:
            raise ConfigError(
                f"recipe.ray_port is {port}, which is taken on this machine ({error.strerror or error}); "
                "nothing was started. Give another port, or null for any free one"
            ) from error


def short_temp_dir() -> Path:
    """A new folder for a run's sockets and temporary files; short, as a socket's path may have 107 bytes."""
    for parent in (tempfile.gettempdir(), "/tmp"):
        longest = len(os.fsencode(parent)) + len("/vp-xxxxxxxx") + len(_RAY_SOCKET)
        if longest <= SOCKET_PATH_BYTES and os.access(parent, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="vp-", dir=parent))
    raise ConfigError(
        f"no folder is short enough for Ray's sockets ({SOCKET_PATH_BYTES} bytes): "
        f"TMPDIR is {tempfile.gettempdir()}; set TMPDIR to a writable folder with a short path"
    )


@contextmanager
def _locked(folder: Path) -> Iterator[Path]:
    """Make the run's folder and lock it for this process; ConfigError where another run is writing to it."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder} is being written by another run; wait for it, or name this one (--run NAME, recipe.run)"
            ) from None
        yield folder


def _check_replay(config: DictConfig) -> None:
    """ConfigError where the recording lacks a step, or where the run would delete it before the replay."""
    replay, folder = config.recipe.rollout.replay, environment.run_dir(config).resolve()
    if replay:
        find_recording(replay, config.trainer.total_training_steps)
    if replay and (folder == Path(replay).resolve() or folder in Path(replay).resolve().parents):
        raise ConfigError(
            f"recipe.rollout.replay is {replay}, inside {folder}, which this run writes anew; "
            "give this run another name (--run NAME, recipe.run)"
        )


def _remove_outputs(folder: Path) -> None:
    for name in OUTPUTS:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _commits(trees: Trees | None) -> dict[str, Any]:
    """{upstream: {repository: commit}} of the trees that the run imports; commit None where one is no git checkout."""
    folders = trees.folders if trees else ()
    return {"upstream": {folder.name: commit_of(folder) for folder in folders}} if folders else {}


def _head(config: DictConfig) -> dict[str, Any]:
    """What summary.json says about the run if the driver wrote none."""
    recipe = config.recipe
    return {
        "run": recipe.run,
        "line": recipe.line,
        "platform": recipe.platform,
        "dtype": recipe.dtype,
        "layout": {"train": str(train_layout_of(config)), "rollout": str(rollout_layout_of(config))},
    }


def last_error(log: Path) -> str | None:
    """The last exception of a log, with all lines of its message and without Ray's wrapping; None without one."""
    if not log.exists():
        return None
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_END_BYTES))
        text = file.read().decode(errors="replace")
    lines = [_PREFIX.sub("", _COLOUR.sub("", line)) for line in text.splitlines()]
    for number in range(len(lines) - 1, -1, -1):
        match = _ERROR.match(lines[number])
        if match and match[1] != _WRAPPER:
            message = [lines[number]]
            for line in lines[number + 1 : number + 12]:
                if not line.startswith("  ") or line.lstrip().startswith("File "):
                    break
                message.append(line)
            return "\n".join(message).strip()[:4000]
    return None


def copy_ray_logs(temp: Path, to: Path) -> None:
    """Copy the non-empty logs of Ray sessions below `temp` (the end of each, 4 MiB) to `to`."""
    for logs in (p for p in temp.glob("**/session_[0-9]*/logs") if not p.parent.is_symlink()):
        for source in sorted(logs.glob("*")):
            if source.is_file() and source.suffix in (".log", ".out", ".err") and source.stat().st_size:
                to.mkdir(parents=True, exist_ok=True)
                with source.open("rb") as file, (to / source.name).open("wb") as copy:
                    file.seek(max(0, source.stat().st_size - _RAY_LOG_BYTES))
                    shutil.copyfileobj(file, copy)


def write_summary(
    folder: Path, code: int, reason: str | None, head: dict[str, Any], peaks: dict[str, int]
) -> tuple[int, str]:
    """Complete the driver's summary.json in `folder`, or write a minimal one from `head`; (exit code, "ok" or reason).

    A driver that exits 0 without a summary that says "ok" has not run to its end: that is an error, code 1.
    """
    path = folder / "summary.json"
    summary = _read(path)
    found = (summary or {}).get("exit")
    given = None if found in ("running", "failed", "ok") else found  # the driver's own reason
    if code == 0 and found == "ok":
        reason = "ok"
    elif code == 0:
        code, reason = 1, given or "the driver ended without finishing its summary"
    elif reason is None:
        reason = given or f"the driver exited with {code}; its log shows no error"
    minimal = {"versions": {}, "steps": [], "logprob_delta": None, "patches": []}
    summary = {**head, **minimal, **(summary or {}), "peak_pss_bytes": peaks, "exit": reason}
    write_json(path, summary)
    return code, reason


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
