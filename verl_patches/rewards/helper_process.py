"""Call an importable function in a helper process with limits of CPU time, wall-clock time and memory.

The kernel ends the process at its limit of CPU time, and the parent at that of wall-clock time; a Python signal handler
cannot stop one long C call, such as 10**10**10.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import resource
import select
import signal
import sys
import threading
import time
import traceback
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from verl_patches.errors import ConfigError

MEMORY_BYTES = 1 << 30  # limit of the helper's memory beyond its imports
_WALL_FACTOR = 4.0  # a call's wall-clock limit over its CPU limit
_TRIAL_LIMITS_S = 60.0, 240.0  # limits of the trial call: CPU, wall clock


class CallError(Exception):
    """Report that a call in a helper process reached a limit, raised an error (its cause), or lost its process."""


class LimitError(CallError):
    """Report that a call in a helper process reached its limit of CPU or wall-clock time."""


class HelperProcess:
    """Run calls of `function`, "module:name", in a process, one at a time; any thread may call.

    Arguments and results are pickled. `trial`: arguments of a first call, which has no memory limit and whose result
    must be true. `memory_bytes`: how much more memory than after the trial the process may have, 0 for no limit. At a
    limit the process and those that it started end; it also ends with its parent, as its standard input then closes.
    """

    def __init__(self, function: str, trial: tuple[Any, ...], memory_bytes: int = MEMORY_BYTES) -> None:
        self._function, self._trial, self._memory_bytes = function, trial, memory_bytes
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None

    def call(self, *arguments: Any, cpu_limit_s: float = 0.0, wall_limit_s: float | None = None) -> Any:
        """Return the function's result, or raise CallError; replace a lost process once.

        Without `wall_limit_s` it is 4 times the limit of CPU time; without `cpu_limit_s` only the clock counts.
        """
        wall_s = wall_limit_s or _WALL_FACTOR * cpu_limit_s
        with self._lock:
            for _ in range(2):
                process, self._process = self._process or self._start(), None  # put back after a reply
                began = time.monotonic()
                reply = _reply(process, arguments, cpu_limit_s, wall_s)
                if reply is not None:
                    self._process = process
                    result, error, trace = reply
                    if error:
                        raise CallError(error) from RuntimeError(trace)
                    return result
                if time.monotonic() - began > wall_s or process.returncode == -signal.SIGPROF:
                    cpu = f"{cpu_limit_s} s of CPU time, or " if cpu_limit_s else ""
                    raise LimitError(f"more than {cpu}{wall_s:g} s by the clock")
        raise CallError(f"the helper process ended twice, the last time with exit code {process.returncode}")

    def _start(self) -> Popen[bytes]:
        """Start and return the process; raise ConfigError unless the result of its trial is true."""
        command = [sys.executable, "-m", "verl_patches.rewards.helper_process", self._function, str(self._memory_bytes)]
        # The import path is that of this process, as a Ray worker finds this package where its driver put it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment, start_new_session=True)
        result, error, trace = _reply(process, self._trial, *_TRIAL_LIMITS_S) or (None, "no reply", "")
        if not result:
            process.kill()
            found = error or f"{result} for a trial with {self._trial}"
            raise ConfigError(
                f"reward: {self._function} cannot start in a helper process, found {found}; expected a true result and "
                "the packages of requirements.txt"
            ) from RuntimeError(trace)
        return process


def _reply(
    process: Popen[bytes], arguments: tuple[Any, ...], cpu_limit_s: float, wall_limit_s: float
) -> tuple[Any, str, str] | None:
    """Return (result, error, traceback) of one call; None if the process was lost and has ended."""
    assert process.stdin and process.stdout
    try:
        pickle.dump((arguments, cpu_limit_s), process.stdin)
        process.stdin.flush()
        if not select.select([process.stdout], [], [], wall_limit_s)[0]:
            process.kill()
        return pickle.load(process.stdout)
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):  # UnpicklingError: it ended within a reply
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what the function started, which may hold the pipes
        process.communicate()  # closes the pipes and waits
        return None


def serve(function: str, memory_bytes: int) -> None:
    """Reply to each call on standard input, until it closes; the memory limit holds after the first call."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process, even in a long C call
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep the function's prints out of the replies

    def answer_call() -> None:
        arguments, cpu_limit_s = pickle.load(sys.stdin.buffer)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        try:
            reply = pickle.dumps((pkgutil.resolve_name(function)(*arguments), "", ""))
        except Exception as why:  # MemoryError and RecursionError too
            reply = pickle.dumps((None, f"{type(why).__name__}: {why}", traceback.format_exc()))
        signal.setitimer(signal.ITIMER_PROF, 0)
        replies.write(reply)
        replies.flush()

    answer_call()
    if memory_bytes:
        with open("/proc/self/statm") as statm:
            now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now_bytes + memory_bytes, resource.RLIM_INFINITY))
    with contextlib.suppress(EOFError):
        while True:
            answer_call()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
