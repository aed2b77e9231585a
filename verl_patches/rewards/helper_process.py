"""Call an importable function in a helper process with limits of CPU time, wall-clock time and memory.

The kernel ends the process at a limit; a Python signal handler cannot stop one long C call, such as 10**10**10.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import pkgutil
import resource
import signal
import sys
import threading
import traceback
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from verl_patches.errors import ConfigError

MEMORY_BYTES = 1 << 30  # limit of the helper's memory beyond its imports
_WALL_FACTOR = 4.0  # a call's wall-clock limit over its CPU limit
_TRIAL_LIMIT_S = 60.0  # CPU limit of the trial call


class CallError(Exception):
    """Report that a call in a helper process reached a limit, raised an error (its cause), or lost its process."""


class HelperProcess:
    """Run calls of `function`, "module:name", in a process, one at a time; any thread may call.

    Arguments and results are pickled. `trial`: arguments of a first call, which has no memory limit and whose result
    must be true. The process ends at a limit, and when its parent ends, as its standard input then closes.
    """

    def __init__(self, function: str, trial: tuple[Any, ...]) -> None:
        self._function, self._trial = function, trial
        self._lock = threading.Lock()
        self._process: Popen[bytes] | None = None

    def call(self, *arguments: Any, cpu_limit_s: float) -> Any:
        """Return the function's result, or raise CallError; replace a lost process once."""
        with self._lock:
            for _ in range(2):
                process, self._process = self._process or self._start(), None  # put back after a reply
                reply = _reply(process, arguments, cpu_limit_s)
                if reply is not None:
                    self._process = process
                    result, error, trace = reply
                    if error:
                        raise CallError(error) from RuntimeError(trace)
                    return result
                if process.returncode in (-signal.SIGPROF, -signal.SIGALRM):
                    raise CallError(f"more than {cpu_limit_s} s of CPU time, or {_WALL_FACTOR} times that by the clock")
        raise CallError(f"the helper process ended twice, the last time with exit code {process.returncode}")

    def _start(self) -> Popen[bytes]:
        """Start and return the process; raise ConfigError unless the result of its trial is true."""
        command = [sys.executable, "-m", "verl_patches.rewards.helper_process", self._function]
        # The import path is that of this process, as a Ray worker finds this package where its driver put it.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, env=environment)
        result, error, _ = _reply(process, self._trial, _TRIAL_LIMIT_S) or (None, "no reply", "")
        if not result:
            process.kill()
            raise ConfigError(
                f"reward: the helper process for {self._function} cannot start; expected a true result of a trial "
                f"call with {self._trial}, found {error or result}. Run: pip install -r requirements.txt"
            )
        return process


def _reply(process: Popen[bytes], arguments: tuple[Any, ...], cpu_limit_s: float) -> tuple[Any, str, str] | None:
    """Return (result, error, traceback) of one call; None if the process was lost and has ended."""
    assert process.stdin and process.stdout
    try:
        pickle.dump((arguments, cpu_limit_s), process.stdin)
        process.stdin.flush()
        return pickle.load(process.stdout)
    except (BrokenPipeError, EOFError, pickle.UnpicklingError):  # UnpicklingError: it ended within a reply
        process.communicate()  # closes the pipes and waits
        return None


def serve(function: str) -> None:
    """Reply to each call on standard input, until it closes; the memory limit holds after the first call."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; its end closes our standard input
    for number in (signal.SIGPROF, signal.SIGALRM):  # end this process, even in a long C call
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep the function's prints out of the replies

    def answer_call() -> None:
        arguments, cpu_limit_s = pickle.load(sys.stdin.buffer)
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s)
        signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * cpu_limit_s)
        try:
            reply = pickle.dumps((pkgutil.resolve_name(function)(*arguments), "", ""))
        except Exception as why:  # MemoryError and RecursionError too
            reply = pickle.dumps((None, f"{type(why).__name__}: {why}", traceback.format_exc()))
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(reply)
        replies.flush()

    answer_call()
    with open("/proc/self/statm") as statm:
        now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    with contextlib.suppress(EOFError):
        while True:
            answer_call()


if __name__ == "__main__":
    serve(sys.argv[1])
