"""Start a run's driver as a child, supervise it, end all its processes, and write a valid summary.json in any case."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from verl_patches.errors import ConfigError, RecipeError, interruption_text, locate_error
from verl_patches.launch.restart import Restarts
from verl_patches.launch.supervise.watcher import ASK_S
from verl_patches.plan.plan import driver_command
from verl_patches.platform.npu.machine import start_notes
from verl_patches.processes import FREE_S, Descendants, MemoryWatch, adopting_orphans, die_with_parent, on_end_signals
from verl_patches.run import environment
from verl_patches.run.files import user_places
from verl_patches.run.record.plots import memory_figure, run_figure, save_figure
from verl_patches.run.record.record import SUMMARY_FILE, read_object, read_summary
from verl_patches.run.run_folder import lock_run, make_start_folder
from verl_patches.run.run_start import driver_run, next_start
from verl_patches.shared_files import GrowingFile
from verl_patches.spec import NextStart, RunSpec
from verl_patches.trainer.record import Progress, write_json
from verl_patches.upstream.checkouts import head_commit
from verl_patches.upstream.modified import files_text

POLL_S, MEMORY_S, END_S = 0.2, 1.0, 5.0
TIMED_OUT = 124  # as timeout(1)
SOCKET_PATH_BYTES = 107
_RAY_SOCKET = f"/{environment.RAY_FOLDER}/session_2025-01-01_00-00-00_000000_0000000/sockets/plasma_store"
_TEMP_PREFIX = "vr-"
_LOG_END_BYTES = 256 << 10
_RAY_LOG_BYTES = 4 << 20  # kept of the end of each of Ray's log files
_RAY_LINE_PREFIX = re.compile(r"^\([^()]*pid=\d+[^()]*\)\s?")
_COLOUR_CODE = re.compile(r"\x1b\[[0-9;]*m")
_WATCH_ERROR = re.compile(r"(?:\w+\.)*(?:LostNodeError|StallError):")
_TRACEBACK_HEADER = "Traceback (most recent call last):"
_RAY_FRAMES = re.compile(r"\bray::\S")  # in a line before the frames of a remote process
_FRAME = re.compile(r'\s*File "')
_ERROR_LINE = re.compile(r"[^\W\d][^\s:()]*(?:\([\w.]+\))?(?:: |:?$)")


@dataclass
class Outcome:
    """Describe how a run ended: exit code, "ok" or the reason, its folder, seconds, peak memory by process."""

    code: int
    reason: str
    folder: Path
    wall_s: float
    peak_rss_bytes: dict[str, int] = field(default_factory=dict)


def run(
    run: RunSpec, on_line: Callable[[str], None] = lambda line: None, dirty: Mapping[str, Sequence[str]] | None = None
) -> Outcome:
    """Run the driver of a run to its end and return the outcome; the driver's progress lines go to `on_line`.

    `on_line` also gets "" every POLL_S, so that it can look at the clock.

    Each start, also a restart, writes to a new folder <output_root>/<run>/0001, 0002, ...; the outcome is that of the
    last one. Its folder has ray_logs/ only after a failure. `dirty`: {repository or package: files} that differ from
    the pins (upstream/modified.py), which the summary and a line above the step table name. Raises ConfigError before
    anything starts. All processes that the run started are ended before this returns, and its temporary folder is
    removed.
    """
    with lock_run(run):
        restarts, start, began = Restarts(run), next_start(run), time.monotonic()
        while True:
            outcome, again = _run_start(restarts, start, on_line, dirty or {}, began)
            if again is None:
                return outcome
            start = again


def _run_start(
    restarts: Restarts,
    start: NextStart,
    on_line: Callable[[str], None],
    dirty: Mapping[str, Sequence[str]],
    run_began: float,
) -> tuple[Outcome, NextStart | None]:
    """Run the driver of a new start to its end; return (outcome, the next start or None if there is none)."""
    run = driver_run(restarts.run(), start, make_start_folder(restarts.base_run, start))
    folder, watch, began = run.folder, MemoryWatch(), time.monotonic()
    head = _summary_head(run) | ({"dirty": dict(dirty)} if dirty else {})
    head |= {"restarts": [*restarts.records]} if restarts.records else {}
    lines = [*start_notes(os.environ, run.platform == "npu")]
    for name, files in dirty.items():
        lines.append(f"| dirty: {name} is not as pinned (drift={run.recipe.drift}): {files_text(files)}")
    for line in lines:
        Progress(folder).say(line)
    progress, again = _LineReader(folder / "progress.log", on_line), None
    code, reason = _run_driver(run, watch, progress, run_began)
    if reason is not None and restarts.allows_restart(code, reason):
        try:
            again = next_start(restarts.base_run)
            Progress(folder).say(f"| {restarts.record_failure(code, reason, folder)}")
        except (ConfigError, OSError) as error:
            reason = f"{reason}; no restart: {error}"
    head["wall_s"] = wall_s = round(time.monotonic() - began, 1)
    try:
        code, reason = write_summary(folder, code, reason, head, watch.peaks())
    except RecipeError as error:  # of a full disk, for which the driver ended too
        return Outcome(code or 1, str(error), folder, wall_s, watch.peaks()), None
    _draw_figures(folder)
    progress.read()
    return Outcome(code, reason, folder, wall_s, watch.peaks()), again


def _run_driver(run: RunSpec, watch: MemoryWatch, progress: _LineReader, began: float) -> tuple[int, str | None]:
    """Run the driver and end all processes that it started; return `_supervise`'s (exit code, reason or None)."""
    folder = run.folder
    OmegaConf.save(run.verl, folder / environment.CONFIG_FILE)
    (folder / environment.FACTS_FILE).write_text(run.text())
    with short_temp_dir() as temp:
        variables = environment.environment_variables(run, str(temp))
        (folder / "environment.json").write_text(json.dumps([asdict(v) for v in variables], indent=1) + "\n")
        env = environment.process_environment(variables, os.environ)
        command = driver_command(folder)
        with adopting_orphans(), _recorded_signals() as signals:
            descendants = Descendants()
            try:
                with (folder / "driver.log").open("ab") as out:
                    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
                    # a session of its own, so that a terminal's Ctrl-C reaches only the launcher
                    driver = subprocess.Popen(
                        command, env=env, **streams, start_new_session=True, preexec_fn=die_with_parent
                    )
                descendants.waited_pids = frozenset({driver.pid})
                code, reason = _supervise(driver, run, descendants, watch, signals, progress, began)
            finally:
                descendants.end_all()
        if code:
            with suppress(OSError):  # the disk may be full, which must not hide the reason
                copy_ray_logs(temp, folder / "ray_logs")
    return code, reason


def _supervise(
    driver: subprocess.Popen,
    run: RunSpec,
    descendants: Descendants,
    watch: MemoryWatch,
    signals: list[int],
    progress: _LineReader,
    started: float,
) -> tuple[int, str | None]:
    """Wait until the driver ends, or end it; return (exit code, reason or None if neither launcher nor log has one)."""
    folder, timeouts = run.folder, run.recipe.timeouts
    logs, log_bytes, reason = (folder / "driver.log", folder / "progress.log"), -1, None
    next_memory = time.monotonic()
    while (code := driver.poll()) is None:
        now = time.monotonic()
        progress.read()
        progress.on_line("")
        size = _log_bytes(logs)
        if size != log_bytes:
            log_bytes, last_output = size, now
        if now >= next_memory:
            alive = descendants.alive()
            watch.sample(alive)
            descendants.shared.record(alive)
            next_memory = max(now, next_memory) + MEMORY_S
        if signals:
            code, reason = 128 + signals[0], interruption_text(signals[0])
            break
        if timeouts.wall_s is not None and now - started > timeouts.wall_s:
            code, reason = TIMED_OUT, f"still running after {timeouts.wall_s:g} s (recipe.timeouts.wall_s)"
            break
        if timeouts.quiet_s is not None and now - last_output > timeouts.quiet_s:
            code, reason = TIMED_OUT, f"no output for {timeouts.quiet_s:g} s (recipe.timeouts.quiet_s)"
            break
        time.sleep(POLL_S)
    _end_driver(driver, progress, logs, 0.0 if run.recipe.ray_address is None else FREE_S + ASK_S)
    progress.read()
    if reason is None and code:  # read the log before other processes write what ending them causes
        error = last_error(folder / "driver.log")
        reason, frames = error or (None, "")
        if reason is None or not _WATCH_ERROR.match(reason):  # the error of a watch counts most: it sees all nodes
            reason = _driver_reason(_driver_summary(folder)) or reason
        if reason and not reason.startswith("verl_patches."):  # our own errors name the place themselves
            reason = locate_error(reason, frames, user_places(run))
        if code < 0:
            reason = f"driver ended by {signal.Signals(-code).name}" + (f"; last error: {reason}" if reason else "")
            code = 128 - code
    return code, reason


def _end_driver(driver: subprocess.Popen, progress: _LineReader, logs: Sequence[Path], limit_s: float) -> None:
    """End the driver first, so that it cannot start more processes while its descendants are ended.

    In a joined Ray it ends the run's processes on all nodes, and waits until they have ended (Watcher.close): it has
    limit_s if it writes that to its logs within END_S.
    """
    if driver.poll() is not None:
        return
    before, began = _log_bytes(logs), time.monotonic()
    driver.terminate()
    while driver.poll() is None:
        progress.read()
        lasted = time.monotonic() - began
        if lasted > limit_s + END_S or (lasted > END_S and _log_bytes(logs) == before):
            driver.kill()
            driver.wait()
        time.sleep(POLL_S)


def _log_bytes(logs: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in logs if path.exists())


@contextmanager
def _recorded_signals() -> Iterator[list[int]]:
    """Record signals that would end this process, in place of ending it (main thread only)."""
    received: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    before = on_end_signals(received.append) if main else {}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _LineReader:
    """Pass each new complete line of a growing file to `on_line`."""

    def __init__(self, path: Path, on_line: Callable[[str], None]):
        self.file, self.on_line, self.rest = GrowingFile(path), on_line, b""

    def read(self) -> None:
        *lines, self.rest = (self.rest + b"".join(self.file.blocks())).split(b"\n")
        for line in lines:
            self.on_line(line.decode(errors="replace"))


@contextmanager
def short_temp_dir() -> Iterator[Path]:
    """Yield a folder for a run's sockets and temporary files; a socket's path may have 107 bytes."""
    longest = len(os.fsencode(tempfile.gettempdir())) + len(f"/{_TEMP_PREFIX}xxxxxxxx") + len(_RAY_SOCKET)
    parent = None if longest <= SOCKET_PATH_BYTES else "/tmp"  # None: that of temporary files
    with tempfile.TemporaryDirectory("", _TEMP_PREFIX, parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _summary_head(run: RunSpec) -> dict[str, Any]:
    """Return the facts for a summary.json that the driver did not write, with the commits of imported checkouts."""
    head = {key: getattr(run.recipe, key) for key in ("run", "line", "platform", "dtype")}
    head |= {"resumed_step": run.start.step, "layout": {"train": str(run.train), "rollout": str(run.rollout)}}
    if run.trees.folders:
        head["upstream"] = {folder.name: head_commit(folder) for folder in run.trees.folders}
    return head


def last_error(log: Path) -> tuple[str, str] | None:
    """Return (exception with its whole message, frames) of the last traceback in a log; None without one.

    A traceback of the driver itself counts before those of other processes, whose lines Ray marks.
    """
    if not log.exists():
        return None
    sources: dict[str, list[str]] = {"": []}
    for line in _read_end(log, _LOG_END_BYTES).decode(errors="replace").splitlines():
        line = _COLOUR_CODE.sub("", line)
        mark = _RAY_LINE_PREFIX.match(line)
        source = mark[0] if mark else ""
        sources.setdefault(source, []).append(line.removeprefix(source))
    return next(filter(None, map(_last_traceback, sources.values())), None)


def _last_traceback(lines: Sequence[str]) -> tuple[str, str] | None:
    """Return (exception with its message, frames) of the last traceback in the lines of one process; None without one.

    An exception's name is known by its place, the first line after the frames. That of Ray's RayTaskError begins the
    frames of the remote process, whose exception follows.
    """
    found, frames = None, list[str]()
    inside = False
    for number, line in enumerate(lines):
        if line == _TRACEBACK_HEADER:
            frames, inside = [], True
        elif inside and line.startswith(" "):
            frames.append(line)
        else:
            if inside and frames and _ERROR_LINE.match(line):
                message = takewhile(lambda text: text.startswith("  ") and not _FRAME.match(text), lines[number + 1 :])
                found = "\n".join([line, *islice(message, 11)])[:4000], "\n".join(frames)
            inside = bool(_RAY_FRAMES.search(line))
    return found


def copy_ray_logs(temp: Path, to: Path) -> None:
    """Copy the end (4 MiB) of Ray's non-empty logs below `temp` to `to`; of one name that of the newest session."""
    for logs in sorted(p for p in temp.glob("**/session_[0-9]*/logs") if not p.parent.is_symlink()):
        for source in sorted(logs.glob("*")):
            if source.suffix not in (".log", ".out", ".err") or not source.is_file():
                continue
            with suppress(FileNotFoundError):  # rotated away
                if text := _read_end(source, _RAY_LOG_BYTES):
                    to.mkdir(parents=True, exist_ok=True)
                    (to / source.name).write_bytes(text)


def _read_end(file: Path, size: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - size))
        return opened.read()


def _draw_figures(folder: Path) -> None:
    """Draw training.png and memory.png from summary.json; print a line where that fails."""
    try:
        summary = read_summary(folder)
        if summary["steps"]:
            save_figure(run_figure(summary), folder / "training.png")
        if any((step.get("memory") or {}).get("phases") for step in summary["steps"]):
            save_figure(memory_figure(summary), folder / "memory.png")
    except ConfigError as error:
        Progress(folder).say(f"| training.png or memory.png was not drawn: {error}")


def _driver_summary(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / SUMMARY_FILE)
    except ConfigError:  # not a JSON object
        return {}


def _driver_reason(summary: Mapping[str, Any]) -> str | None:
    """Return why the run ended, as its driver wrote it; the log's last error may be that of any process."""
    reason = summary.get("exit")
    return None if reason in ("running", "failed", "ok") else reason


def write_summary(
    folder: Path, code: int, reason: str | None, head: dict[str, Any], peaks: dict[str, int]
) -> tuple[int, str]:
    """Complete the driver's summary.json in `folder`, or write a minimal one from `head`.

    Return (exit code, "ok" or reason).

    A driver that exits 0 without a summary that says "ok" has not run to its end: that is an error, code 1.
    """
    summary = _driver_summary(folder)
    if code == 0 and summary.get("exit") == "ok":
        reason = "ok"
    elif code == 0:
        code, reason = 1, _driver_reason(summary) or "the driver exited with 0 before it had completed its summary.json"
    elif reason is None:
        lines = _read_end(folder / "driver.log", 1000).decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        reason = f"the driver exited with {code}; driver.log has no traceback and ends with: {last}"
    minimal: dict[str, Any] = {"versions": {}, "steps": [], "logprob_delta": None, "patches": []}
    # not the driver's, which may have ended before it wrote them
    known = {"resumed_step": head["resumed_step"], "peak_rss_bytes": peaks, "exit": reason}
    write_json(folder / "summary.json", {**head, **minimal, **summary, **known})
    return code, reason
