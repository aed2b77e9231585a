"""Read one node's processes of a run (heartbeats, states, Python stacks), and end them. No torch.

The driver calls these functions for its own node, and a small Ray actor on each other node does (watcher.py).
"""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import signal
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from verl_patches.heartbeat.heartbeat import BEAT_SUFFIX, STACK_SIGNAL, STACK_SUFFIX, Beat, heartbeat_folder, read_beat
from verl_patches.processes import FREE_S, process_state

STACK_S = 5.0  # time limit of a process to write its stacks
STOPPED_STATES = "Tt"  # states of a process that a signal, or a debugger, has stopped


@dataclass
class SeenProcess:
    """Describe one process as its node sees it.

    beat: its last record; host: the node's host name; in_place_s: seconds in the present call and phase; silent_s:
    seconds since its last beat; state: that of processes.process_state; still_s: seconds since the last call, phase or
    operation of a process group began; node: Ray's id of its node; disk_still_s: seconds since its bytes of weights and
    checkpoints grew last, infinite before the first.
    """

    beat: Beat
    host: str
    in_place_s: float
    silent_s: float
    state: str
    still_s: float = 0.0
    node: str = ""
    disk_still_s: float = math.inf

    @property
    def where(self) -> str:
        """Return the process for a message: name, pid and host."""
        return f"{self.beat.name} (pid {self.beat.pid} on {self.host})"


def read_processes(folder: Path, node: str = "") -> list[SeenProcess]:
    """Return all processes of node `node` with a record in `folder`: ranks in order, then the controller."""
    processes, now, host = [], time.monotonic(), socket.gethostname()
    for file in folder.glob(f"*{BEAT_SUFFIX}"):
        if (beat := read_beat(file)) is not None:
            state = process_state(beat.pid, beat.started)
            still_s = now - max(beat.since_s, beat.moved_s)
            seen = SeenProcess(beat, host, now - beat.since_s, now - beat.at_s, state, still_s, node)
            seen.disk_still_s = now - beat.disk_at_s if beat.disk_at_s else math.inf
            processes.append(seen)
    return sorted(processes, key=rank_order)


def rank_order(seen: SeenProcess) -> tuple[bool, int]:
    """Return a sort key: ranks in order, then the controller."""
    return seen.beat.rank is None, seen.beat.rank or 0


def stacks(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return {name: Python stacks of all threads} of these processes; a text says why stacks are missing.

    A stopped process is continued, as it could not handle the signal: call this only for a run that is to be ended.
    """
    signalled: dict[str, tuple[Path, int]] = {}
    by_name: dict[str, str] = {}
    for seen in read_processes(folder):
        beat = seen.beat
        if beat.name not in names:
            continue
        file = folder / beat.name.replace(" ", "_")
        if seen.state == "gone":
            by_name[beat.name] = "no stacks: the process has ended"
            continue
        with suppress(OSError):
            signalled[beat.name] = file.with_suffix(STACK_SUFFIX), file.with_suffix(STACK_SUFFIX).stat().st_size
            # signal the main thread: while another handled it, the main thread of a continued process could move on
            ctypes.CDLL(None).tgkill(beat.pid, beat.pid, STACK_SIGNAL)
            if seen.state in STOPPED_STATES:
                os.kill(beat.pid, signal.SIGCONT)
    deadline = time.monotonic() + STACK_S
    for name, (file, before) in signalled.items():
        while not (text := _appended_text(file, before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        by_name[name] = (
            text or f"no stacks within {STACK_S:g} s: the process does not handle signals (blocked in the kernel?)"
        )
    return by_name


def _appended_text(file: Path, before: int) -> str:
    """Return the text that was appended to a stack file, once the file stops growing; empty if it has not grown."""
    size = file.stat().st_size
    if size <= before:
        return ""
    while True:
        time.sleep(0.1)
        if (now := file.stat().st_size) == size:
            return file.read_bytes()[before:].decode(errors="replace")
        size = now


def close(folder: Path, failed: bool) -> list[str]:
    """Remove the heartbeats; if the run failed, first kill its processes here, and wait until all have ended.

    Return the processes, as text, that have not ended after FREE_S.
    """
    ends, left = time.monotonic() + FREE_S, _living(folder) if failed else []
    for seen in left:
        with suppress(OSError):
            os.kill(seen.beat.pid, signal.SIGKILL)  # SIGKILL ends stopped processes too
    while left and time.monotonic() < ends:
        time.sleep(0.1)
        left = _living(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return [seen.where for seen in left]


def _living(folder: Path) -> list[SeenProcess]:
    return [seen for seen in read_processes(folder) if seen.state != "gone"]


class NodeAgent:
    """Call this module's functions on another node than the driver's, as a Ray actor without resources."""

    def __init__(self) -> None:
        import ray

        self._folder, self._node = heartbeat_folder(), ray.get_runtime_context().get_node_id()

    def processes(self) -> list[SeenProcess]:
        """Call `read_processes`."""
        return read_processes(self._folder, self._node)

    def stacks(self, names: Collection[str]) -> dict[str, str]:
        """Call `stacks`."""
        return stacks(self._folder, names)

    def close(self, failed: bool) -> list[str]:
        """Call `close`."""
        return close(self._folder, failed)
