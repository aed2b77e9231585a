"""Write the present call and phase of a process to a small file on its node, which others read. No torch.

One file per process, `<folder>/<name>.beat`, holds one JSON object (class Beat). It is written when a call or a phase
begins or ends, and every BEAT_S by a thread, which adds the number of collectives that each process group has begun
(the backend's sequence number: nothing is wrapped, and no collective is called). A process that is stopped, dead or
inside a call that holds the GIL writes nothing, which the age of its last beat shows.

The blocks of the file are allocated first, so that a full disk cannot fail a later write. When the process receives
STACK_SIGNAL, the Python stacks of all threads are written to `<name>.stack`: faulthandler does this in the signal
handler, while Python itself waits.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl_patches.current import Current
from verl_patches.processes import start_ticks

log = logging.getLogger(__name__)
BEAT_S = 1.0
READ_ATTEMPTS = 20  # attempts at a record that its process is writing
STACK_SIGNAL = signal.SIGUSR2
FILE_BYTES = 64 << 10  # 25 groups of a 256-die run take 3 KiB
BEAT_SUFFIX, STACK_SUFFIX = ".beat", ".stack"


@dataclass
class Beat:
    """Hold one record of a process's state.

    name: "rank 3" or "controller"; rank: None for the controller; pid, started: the process and its start time, as in
    /proc/<pid>/stat; call: the method that the trainer called, "" between calls; phase: the call's present phase;
    since_s: when that began; at_s: when this was written, both on the host's monotonic clock; step: the controller's
    step; longest_s: {"call phase": longest seconds} of those that ended; groups: {"name ranks": operations begun} of
    process groups; moved_s: when one of these numbers changed last; groups_before: the numbers at the beginning of the
    call; disk_bytes: bytes of weights and checkpoints that were read or written in the call; disk_at_s: when they grew
    last, 0 before.
    """

    name: str
    rank: int | None
    pid: int
    started: int
    call: str = ""
    phase: str = ""
    since_s: float = 0.0
    at_s: float = 0.0
    moved_s: float = 0.0
    step: int = 0
    longest_s: dict[str, float] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)
    groups_before: dict[str, int] = field(default_factory=dict)
    disk_bytes: int = 0
    disk_at_s: float = 0.0

    @property
    def place(self) -> str:
        """Return call and phase as one name, as in `longest_s`; "" between calls."""
        return f"{self.call} {self.phase}".strip()


class Heartbeat:
    """Write the state of this process to its file, from `start` on; before it the methods have no effect."""

    def __init__(self) -> None:
        self._beat, self._file = Beat("", None, 0, 0), -1
        self._group_names: dict[Any, str] = {}
        self._lock = threading.Lock()

    def start(self, folder: Path, name: str, rank: int | None = None) -> None:
        """Write beats to `folder`/`name`.beat; warn if the file cannot be made. Idempotent."""
        if self._file >= 0:
            return
        path, file = folder / name.replace(" ", "_"), -1
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = os.open(path.with_suffix(BEAT_SUFFIX), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
            os.posix_fallocate(file, 0, FILE_BYTES)
            self._stack = path.with_suffix(STACK_SUFFIX).open("w")
        except OSError as error:
            text = (
                "watch: %s has no heartbeat, so its stalls are not detected: %s cannot be written: %s; free space "
                "there, or make it writable"
            )
            log.warning(text, name, folder, error.strerror)
            if file >= 0:
                os.close(file)
            return
        faulthandler.register(STACK_SIGNAL, self._stack, all_threads=True)
        self._beat = Beat(name, rank, os.getpid(), start_ticks(os.getpid()), since_s=time.monotonic())
        self._file = file
        self._write()
        threading.Thread(target=self._write_beats, name="verl_patches heartbeat", daemon=True).start()

    @contextmanager
    def in_call(self, name: str) -> Iterator[None]:
        """Mark the block as a call of the trainer to this process; `begin_phase` names its parts."""
        self._count_collectives()
        self._beat.groups_before, self._beat.disk_bytes = self._beat.groups, 0
        self._set_place(name, "")
        try:
            yield
        finally:
            self._count_collectives()
            self._set_place("", "")

    def begin_phase(self, name: str) -> None:
        """Begin phase `name` of the call ("" for none), which ends the previous one."""
        self._set_place(self._beat.call, name)

    def count_bytes(self, size: int) -> None:
        """Count bytes of weights or of a checkpoint that were read, or are on the disk; the next beat has their sum."""
        self._beat.disk_bytes += size
        self._beat.disk_at_s = time.monotonic()

    def set_controller_step(self, step: int, name: str) -> None:
        """Record that the controller is in `step` and begins the part `name` of it (layout/phases.py)."""
        self._beat.step = step
        self._set_place(name, "")

    def _set_place(self, call: str, phase: str) -> None:
        with self._lock:
            beat, now = self._beat, time.monotonic()
            if beat.call:
                beat.longest_s[beat.place] = max(beat.longest_s.get(beat.place, 0.0), now - beat.since_s)
            beat.call, beat.phase, beat.since_s = call, phase, now
            self._write()

    def _write_beats(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self.beat()

    def beat(self) -> None:
        """Count the collectives and write the present state."""
        self._count_collectives()
        with self._lock:
            self._write()

    def _count_collectives(self) -> None:
        groups = self._begun_by_group() if self._file >= 0 else {}
        with self._lock:
            if groups != self._beat.groups:
                self._beat.groups, self._beat.moved_s = groups, time.monotonic()

    def _write(self) -> None:
        if self._file < 0:
            return
        self._beat.at_s = time.monotonic()
        text = json.dumps(vars(self._beat)).encode()
        head = f"{len(text)} {zlib.crc32(text)}\n".encode()
        if len(head) + len(text) <= FILE_BYTES:
            os.pwrite(self._file, head + text, 0)

    def _begun_by_group(self) -> dict[str, int]:
        c10d = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None or not c10d.is_initialized():
            return {}
        for group, name in list(c10d._world.pg_names.items()):
            ranks = c10d._world.pg_group_ranks.get(group)
            if ranks is not None and len(ranks) > 1 and group not in self._group_names:
                self.count_group(group, name, ranks)
        begun = {name: _collectives_begun(group) for group, name in list(self._group_names.items())}
        return {name: number for name, number in begun.items() if number is not None}

    def count_group(self, group: Any, name: str, ranks: Any) -> None:
        """Count the operations of a process group that torch.distributed does not know."""
        self._group_names[group] = f"{name} {ranks_text(ranks)}"


def _collectives_begun(group: Any) -> int | None:
    """Return how many collectives this process has begun in a group; None where its backend does not count them.

    The backend is asked because ProcessGroup itself refuses backends that torch does not know (HCCL).
    """
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return max(backend._get_sequence_number_for_group() for backend in backends)
    except (RuntimeError, ValueError, AttributeError):
        return None


def ranks_text(ranks: Any) -> str:
    """Return ranks in order as "0-7", "0-12:4" (every fourth) or "0,1,5"."""
    ranks = sorted(ranks)
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) < 3 or ranks != list(range(ranks[0], ranks[-1] + 1, step)):
        return ",".join(map(str, ranks))
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")


def read_beat(file: Path) -> Beat | None:
    """Return the record in a file; None if there is none, or only a part of one."""
    for _ in range(READ_ATTEMPTS):
        try:
            head, _, rest = file.read_bytes().partition(b"\n")
            size, check = map(int, head.split())
            if zlib.crc32(rest[:size]) == check:
                return Beat(**json.loads(rest[:size]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            pass
        time.sleep(0.001)  # its process is writing, and may wait for a core
    return None


_heartbeat: Current[Heartbeat] = Current(Heartbeat())


def current_heartbeat() -> Heartbeat:
    """Return the heartbeat of this process."""
    return _heartbeat.value


def start_in_ray(name: str, rank: int | None = None) -> None:
    """Start this process's heartbeat in the folder of its Ray job; outside of Ray there is no effect."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        current_heartbeat().start(heartbeat_folder(), name, rank)


def heartbeat_folder() -> Path:
    """Return the folder of heartbeats of this process's Ray job on this node, inside Ray's session folder.

    Its name contains the node's id, as several nodes (raylets, network namespaces of one machine) may share files.
    """
    import ray

    session = ray._private.worker._global_node.get_session_dir_path()
    context = ray.get_runtime_context()
    return Path(session) / f"verl_patches-watch-{context.get_job_id()}-{context.get_node_id()}"
