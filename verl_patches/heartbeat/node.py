"""Read, dump and end one node's processes of a run: heartbeats, states, Python stacks. No torch.

Called in the driver for its own node, and in a small Ray actor on each other node (watcher.py).
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from verl_patches.heartbeat.heartbeat import BEAT, STACK, STACK_SIGNAL, Beat, folder_of_run, read
from verl_patches.processes import state_of

STACK_S = 5.0  # how long a process may take to write its stacks
STOPPED = "Tt"  # states of a process that a signal, or a debugger, has stopped


@dataclass
class Seen:
    """One process as its node sees it.

    beat: its last record; host: of the node; in_place_s: seconds in the present call and phase; silent_s: seconds since
    its last beat; state: as of processes.state_of; still_s: seconds since the last call or phase, or operation of a
    process group, began; node: Ray's id of its node.
    """

    beat: Beat
    host: str
    in_place_s: float
    silent_s: float
    state: str
    still_s: float = 0.0
    node: str = ""

    @property
    def where(self) -> str:
        """The process for a message: name, pid and host."""
        return f"{self.beat.name} (pid {self.beat.pid} on {self.host})"


def read_processes(folder: Path, node: str = "") -> list[Seen]:
    """All processes of node `node` with a record in `folder`, ranks in order, then the controller."""
    processes, now, host = [], time.monotonic(), socket.gethostname()
    for file in folder.glob(f"*{BEAT}"):
        if (beat := read(file)) is not None:
            state = state_of(beat.pid, beat.started)
            still_s = now - max(beat.since_s, beat.moved_s)
            processes.append(Seen(beat, host, now - beat.since_s, now - beat.at_s, state, still_s, node))
    return sorted(processes, key=ranks_first)


def ranks_first(seen: Seen) -> tuple[bool, int]:
    """Key to sort by: ranks in order, then the controller."""
    return seen.beat.rank is None, seen.beat.rank or 0


def stacks(folder: Path, names: Collection[str]) -> dict[str, str]:
    """{name: Python stacks of all threads} of these processes; a text in their place where there are none.

    A stopped process is continued, as it would not take the signal: ask only of a run that is to be ended.
    """
    asked: dict[str, tuple[Path, int]] = {}
    of_process: dict[str, str] = {}
    for seen in read_processes(folder):
        beat = seen.beat
        if beat.name not in names:
            continue
        file = folder / beat.name.replace(" ", "_")
        if seen.state == "gone":
            of_process[beat.name] = "no stacks: the process has ended"
            continue
        with suppress(OSError):
            asked[beat.name] = file.with_suffix(STACK), file.with_suffix(STACK).stat().st_size
            # the main thread: another one could take it while a process that is continued runs on there
            ctypes.CDLL(None).tgkill(beat.pid, beat.pid, STACK_SIGNAL)
            if seen.state in STOPPED:
                os.kill(beat.pid, signal.SIGCONT)
    deadline = time.monotonic() + STACK_S
    for name, (file, before) in asked.items():
        while not (text := _whole(file, before)) and time.monotonic() < deadline:
            time.sleep(0.05)
        of_process[name] = text or f"no stacks within {STACK_S:g} s: the process does not take signals (in the kernel)"
    return of_process


def _whole(file: Path, before: int) -> str:
    """What was appended to a stack file, once it does not grow any more."""
    size = file.stat().st_size
    if size <= before:
        return ""
    while True:
        time.sleep(0.1)
        if (now := file.stat().st_size) == size:
            return file.read_bytes()[before:].decode(errors="replace")
        size = now


def close(folder: Path, failed: bool) -> list[str]:
    """Remove the heartbeats; of a run that failed, first kill its processes here: the names of those still there."""
    alive = [seen for seen in read_processes(folder) if failed and seen.state != "gone"]
    for seen in alive:
        with suppress(OSError):
            os.kill(seen.beat.pid, signal.SIGKILL)  # stopped ones too
    shutil.rmtree(folder, ignore_errors=True)
    return [seen.beat.name for seen in alive]


class NodeAgent:
    """The same for a node that is not the driver's, as a Ray actor without resources."""

    def __init__(self) -> None:
        import ray

        self._folder, self._node = folder_of_run(), ray.get_runtime_context().get_node_id()

    def processes(self) -> list[Seen]:
        """`read_processes`."""
        return read_processes(self._folder, self._node)

    def stacks(self, names: Collection[str]) -> dict[str, str]:
        """`stacks`."""
        return stacks(self._folder, names)

    def close(self, failed: bool) -> list[str]:
        """`close`."""
        return close(self._folder, failed)
