"""Start a run's driver as a child, watch it, end everything it started, and leave one summary whatever happened."""

from __future__ import annotations

import fcntl
import json
import os
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

from verl_patches.cluster import environment
from verl_patches.cluster.checkouts import Trees, commit_of
from verl_patches.cluster.memory_watch import MemoryWatch
from verl_patches.cluster.modified import said
from verl_patches.cluster.outcome import copy_ray_logs, last_error, write_summary
from verl_patches.cluster.plan import driver_command
from verl_patches.cluster.processes import Descendants, adopting_orphans, die_with_parent
from verl_patches.errors import ConfigError
from verl_patches.evaluation.memory_picture import draw_memory
from verl_patches.evaluation.plots import plot_run
from verl_patches.layout.of_config import rollout_layout_of, train_layout_of
from verl_patches.trainer.recording import find_recording
from verl_patches.trainer.summary import Progress

LOOK_S, MEMORY_S = 0.2, 1.0
TIMED_OUT = 124  # as timeout(1)
SOCKET_PATH_BYTES = 107
_RAY_SOCKET = "/session_2025-01-01_00-00-00_000000_0000000/sockets/plasma_store"
# what earlier runs of the same name left, from launcher and driver alike; nothing else in the folder is touched
OUTPUTS = ("config.yaml", "environment.json", "driver.log", "progress.log", "summary.json", "tensorboard",
           "training.png", "memory.png", "rollouts", "ray_logs")


@dataclass
class Outcome:
    """How a run ended: exit code, "ok" or the reason, folder, seconds, peak memory, processes that had to be ended."""

    code: int
    reason: str
    folder: Path
    wall_s: float
    peak_pss_bytes: dict[str, int] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)


def run(
    config: DictConfig,
    config_name: str,
    overrides: Sequence[str],
    on_line: Callable[[str], None] = lambda line: None,
    trees: Trees | None = None,
    command: Sequence[str] | None = None,
    dirty: Mapping[str, Sequence[str]] | None = None,
) -> Outcome:
    """Run the driver of `config` to its end and return the outcome; the driver's progress lines go to `on_line`.

    Writes <output_root>/<run>/: config.yaml, environment.json, driver.log, and after the driver summary.json
    (peak_pss_bytes and exit filled in) and on failure ray_logs/. `command` replaces the driver's command line
    (tests). `dirty`: {repository or package: files} that are not as pinned (modified.py); the summary and a line above
    the step table have them. Raises ConfigError before anything starts. All processes that the run started are ended
    before this returns, and its temporary folder is removed.
    """
    require_free_port(config.recipe.ray_port)
    _check_replay(config)
    with _locked(environment.run_dir(config)) as folder:
        return _run(config, config_name, overrides, on_line, trees, command, _fresh_folder(folder),
                    dict(dirty or {}))


def _run(config, config_name, overrides, on_line, trees, command, folder, dirty) -> Outcome:
    temp = short_temp_dir()
    for name, files in dirty.items():
        Progress(folder).say(f"| dirty: {name} is not as pinned (drift={config.recipe.drift}): {said(files)}")
    started = time.monotonic()
    try:
        variables = environment.derive(config, str(temp), trees)
        OmegaConf.save(config, folder / "config.yaml")
        (folder / "environment.json").write_text(json.dumps([asdict(v) for v in variables], indent=1) + "\n")
        watch = MemoryWatch()
        with adopting_orphans(), _Signals() as signals:
            descendants = Descendants()
            try:
                code, reason = _supervise(
                    list(command or driver_command(config_name, overrides)),
                    environment.process_environment(variables, os.environ),
                    folder,
                    config,
                    descendants,
                    watch,
                    signals,
                    on_line,
                )
            finally:
                ended = descendants.end_all()
        if code:
            copy_ray_logs(temp, folder / "ray_logs")
    finally:
        shutil.rmtree(temp, ignore_errors=True)
    wall_s = round(time.monotonic() - started, 1)
    head = {**_head(config), **_commits(trees), **({"dirty": dirty} if dirty else {}), "wall_s": wall_s}
    code, reason = write_summary(folder, code, reason, head, watch.peaks())
    summary = json.loads((folder / "summary.json").read_text())
    if summary["steps"]:
        plot_run(summary, folder / "training.png")
    if any(step.get("memory") for step in summary["steps"]):
        draw_memory(summary, folder / "memory.png")
    return Outcome(code, reason, folder, wall_s, watch.peaks(), ended)


def _supervise(command, env, folder, config, descendants, watch, signals, on_line) -> tuple[int, str | None]:
    """Run `command` until it ends or must be ended; (exit code, reason or None where the log has to tell)."""
    timeouts = config.recipe.timeouts
    with (folder / "driver.log").open("ab") as out:
        driver = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                  start_new_session=True, preexec_fn=die_with_parent)
    descendants.waited_for = frozenset({driver.pid})
    follow, start = _Follow(folder / "progress.log", on_line), time.monotonic()
    next_memory, quiet = start, _Quiet(folder / "driver.log", folder / "progress.log")
    reason, code = None, None
    while code is None:
        code = driver.poll()
        now = time.monotonic()
        follow.look()
        if now >= next_memory:
            alive = descendants.alive()
            watch.look(alive)
            descendants.shared.look(alive)
            next_memory = max(now, next_memory) + MEMORY_S
        if code is not None:
            break
        if signals.received:
            code, reason = 128 + signals.received, f"interrupted by {signal.Signals(signals.received).name}"
        elif timeouts.wall_s is not None and now - start > timeouts.wall_s:
            code, reason = TIMED_OUT, f"still running after {timeouts.wall_s:g} s (recipe.timeouts.wall_s)"
        elif timeouts.quiet_s is not None and quiet.seconds() > timeouts.quiet_s:
            code, reason = TIMED_OUT, f"no output for {timeouts.quiet_s:g} s (recipe.timeouts.quiet_s)"
        else:
            time.sleep(LOOK_S)
    _end_driver(driver)
    follow.look()
    if reason is None and code:
        reason = last_error(folder / "driver.log")
        if code < 0:
            reason = f"driver ended by {signal.Signals(-code).name}" + (f"; last error: {reason}" if reason else "")
            code = 128 - code
    return code, reason


def _end_driver(driver: subprocess.Popen) -> None:
    """End the driver first, so that it cannot start more while its descendants are ended."""
    if driver.poll() is None:
        driver.terminate()
        try:
            driver.wait(5)
        except subprocess.TimeoutExpired:
            driver.kill()
            driver.wait()


class _Signals:
    """Notes SIGINT and SIGTERM instead of dying of them, so that what was started can be ended (main thread only)."""

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


class _Follow:
    """Hands on the whole new lines of a growing file."""

    def __init__(self, path: Path, on_line: Callable[[str], None]):
        self.path, self.on_line, self.offset = path, on_line, 0

    def look(self) -> None:
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
    """A new folder of its own for a run's sockets and scratch; short, as a socket's path may hold 107 bytes."""
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
    """The run's folder, for this process alone; ConfigError where another run is writing to it."""
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
    """ConfigError where the recording does not hold every step, or the run would delete what it is to replay."""
    replay, folder = config.recipe.rollout.replay, environment.run_dir(config).resolve()
    if replay:
        find_recording(replay, config.trainer.total_training_steps)
    if replay and (folder == Path(replay).resolve() or folder in Path(replay).resolve().parents):
        raise ConfigError(
            f"recipe.rollout.replay is {replay}, inside {folder}, which this run writes anew; "
            "give this run another name (--run NAME, recipe.run)"
        )


def _fresh_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in OUTPUTS:
        path = folder / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return folder


def _commits(trees: Trees | None) -> dict[str, Any]:
    """{upstream: {repository: commit}} of the trees that a run took its Python from; None where it is no checkout."""
    folders = trees.folders if trees else ()
    return {"upstream": {folder.name: commit_of(folder) for folder in folders}} if folders else {}


def _head(config: DictConfig) -> dict[str, Any]:
    """What summary.json says about the run if the driver could not say it."""
    recipe = config.recipe
    return {"run": recipe.run, "line": recipe.line, "platform": recipe.platform, "dtype": recipe.dtype,
            "layout": {"train": str(train_layout_of(config)), "rollout": str(rollout_layout_of(config))}}
