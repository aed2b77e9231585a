"""Find, end and measure all processes of a run and no others; those that detach are adopted.

The launcher becomes a "child subreaper" of Linux: a daemon whose parent dies, such as Ray's gcs_server and raylet, is
handed to the launcher instead of to init, so every process that a run starts stays a descendant of the launcher.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import signal
import socket
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 1, 36, 37
END_SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP
TERM_S, KILL_S = 5.0, 5.0  # wait for processes after SIGTERM, and after SIGKILL
FREE_S = 600.0  # limit of killed processes to free their dies and pinned host memory, of hundreds of GB on a node


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """Adopt orphaned descendants of this process as its children inside the block."""
    libc, before = ctypes.CDLL(None, use_errno=True), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


def die_with_parent() -> None:
    """Let this forked child receive SIGKILL when its parent dies without cleaning up."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def on_end_signals(act: Callable[[int], None]) -> dict[int, Any]:
    """Call `act(number)` at SIGINT, SIGTERM and SIGHUP from now on; return the previous handlers.

    Main thread only. SIGHUP stays ignored where it was, as by nohup. After a SIGHUP only output to files goes on.
    """

    def received(number: int, _frame: object) -> None:
        if number == signal.SIGHUP:
            for stream in (1, 2):
                with suppress(OSError):  # the stream may be closed
                    if not stat.S_ISREG(os.fstat(stream).st_mode):  # writing to a closed terminal fails
                        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        act(number)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    numbers = END_SIGNALS[:2] if ignored else END_SIGNALS
    return {number: signal.signal(number, received) for number in numbers}


class Descendants:
    """Track the descendants of this process that were started after the object was made."""

    def __init__(self) -> None:
        self._me = psutil.Process()
        self._before = set(self._me.children(recursive=True))
        self.shared = SharedMemory()
        self.waited_pids: frozenset[int] = frozenset()  # children that other code waits for (the driver's Popen)

    def alive(self) -> list[psutil.Process]:
        """Return the descendants that still run, and reap finished orphans among them."""
        descendants = [p for p in self._me.children(recursive=True) if p not in self._before]
        return [p for p in descendants if not self._is_gone(p)]

    def _is_gone(self, process: psutil.Process) -> bool:
        if not is_gone(process):
            return False
        with suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.ppid() == self._me.pid and process.pid not in self.waited_pids:
                os.waitpid(process.pid, os.WNOHANG)
        return True

    def end_all(self) -> None:
        """End all descendants (`end_processes`), and warn of those that stay."""
        for process in end_processes(self.alive, self.shared):
            log.warning("process %d (%s) still runs after SIGTERM and SIGKILL", process.pid, process_name(process))


def is_gone(process: psutil.Process) -> bool:
    """Return whether a process has ended; its parent may not have waited for it yet."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_processes(living: Callable[[], Sequence[psutil.Process]], shared: SharedMemory) -> Sequence[psutil.Process]:
    """Send SIGTERM, then SIGKILL to the living processes until all have ended; then remove their shared memory.

    Return the processes that could not be ended.
    """
    for number, timeout_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S), (signal.SIGKILL, FREE_S)):
        left = living()
        if not left:
            break
        shared.record(left)
        for process in left:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.send_signal(number)
        ends = time.monotonic() + timeout_s
        while living() and time.monotonic() < ends:
            time.sleep(0.05)
    shared.remove()
    return living()


class SharedMemory:
    """Record and remove the shared memory files of a run; a killed process, as of vLLM's TP, leaves its files behind.

    Python's multiprocessing names them psm_* at random, so those that a process of the run maps count as the run's.
    """

    FOLDER = Path("/dev/shm")

    def __init__(self) -> None:
        self._names: set[str] = set()

    def record(self, processes: Iterable[psutil.Process]) -> None:
        """Record the files that the living processes have mapped; a system without /proc records none."""
        for process in processes:
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                self._names.update(re.findall(rf"{self.FOLDER}/(psm_\w+)", maps))

    def remove(self) -> None:
        """Unlink the recorded files that still exist, once the run's processes have ended."""
        for name in self._names:
            (self.FOLDER / name).unlink(missing_ok=True)


def port_holder(port: int, addresses: Iterable[str]) -> str | None:
    """Return the process that holds a port of these addresses, as far as this user may see; None where all are free."""
    for address in addresses:
        try:
            with socket.create_server((address, port)):
                pass
        except OSError as error:
            with suppress(psutil.Error, OSError):
                for one in psutil.net_connections("tcp"):
                    if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN and one.pid:
                        return f"pid {one.pid} ({' '.join(psutil.Process(one.pid).cmdline())[:100]})"
            return f"a process of another user or namespace ({error.strerror})"
    return None


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 for no such process.

    Together with its pid this identifies a process. psutil's create_time does not, as it moves when the machine's clock
    is set.
    """
    return int((_stat_fields(pid) or ["0"] * 20)[19])


def process_state(pid: int, started: int) -> str:
    """Return the state of a process: a letter of proc(5), such as T for stopped; "gone" where it has ended.

    A zombie with other threads has not: they hold its memory and devices.
    """
    stat = _stat_fields(pid)
    ended = stat is None or int(stat[19]) != started or (stat[0] in "ZX" and int(stat[17]) <= 1)
    return "gone" if stat is None or ended else stat[0]


def _stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/<pid>/stat from the third (state) on; the second, a name, may have spaces and ")"."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def process_name(process: psutil.Process) -> str:
    """Return a process's short role: "driver", Ray's own ("raylet", "WorkerDict", "IDLE"), or the program's name."""
    try:
        line = process.cmdline() or [process.name()]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return "gone"
    head = line[0]
    if head.startswith("ray::"):
        return head.removeprefix("ray::").split(".")[0].split("(")[0].split()[0]
    if "-m" in line[:4]:
        module = line[line.index("-m") + 1]
        return "driver" if module == "verl_patches.main" else module.rpartition(".")[2]
    script = next((part for part in line[1:] if part.endswith(".py")), "")
    return os.path.basename(script or head).removesuffix(".py")


class MemoryWatch:
    """Measure the peak resident memory of processes: call `sample` with the living ones about once a second.

    Pages that processes share count once for each of them.
    """

    def __init__(self) -> None:
        self._peaks: dict[psutil.Process, tuple[int, str]] = {}
        self._total = 0

    def sample(self, processes: Iterable[psutil.Process]) -> None:
        """Read the resident sizes of the processes."""
        total = 0
        for process in processes:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                size = process.memory_info().rss
                total += size
                if size > self._peaks.get(process, (0, ""))[0]:
                    self._peaks[process] = size, process_name(process)
        self._total = max(self._total, total)

    def peaks(self) -> dict[str, int]:
        """Return {process: peak bytes, "total": peak of the sum in bytes}; equal names are numbered by size."""
        names, peaks = Counter(name for _, name in self._peaks.values()), {}
        seen: Counter[str] = Counter()
        for size, name in sorted(self._peaks.values(), reverse=True):
            peaks[f"{name} {seen[name]}" if names[name] > 1 else name] = size
            seen[name] += 1
        return {**peaks, "total": self._total}
