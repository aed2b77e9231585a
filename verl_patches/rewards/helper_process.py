"""Calls a function in a helper process with limits of CPU time, wall-clock time and memory.

The kernel ends the process at a limit; a signal handler in Python cannot stop one long C call, as 10**10**10.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
import threading
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from verl_patches.errors import ConfigError

MEMORY_BYTES = 1 << 30  # of the helper, on top of its imports
_WALL_FACTOR = 4.0  # limit of a call's wall-clock time over its CPU limit


class CallError(Exception):
    """A call in a helper process reached a limit, raised an error, or lost its process."""


class HelperProcess:
    """A process that makes one call of `function` ("module:name") at a time; any thread may ask for one.

    Arguments and results are JSON. `trial`: arguments of a first call, without a memory limit, that must return true.
    The process ends itself at a limit, and when its parent ends, because its standard input then closes.
    """

    def __init__(self, function: str, trial: list[Any]) -> None:
        self._command = [sys.executable, "-m", "verl_patches.rewards.helper_process", function, json.dumps(trial)]
        self._lock = threading.Lock()
        self._process: Popen[str] | None = None

    def call(self, *arguments: Any, cpu_limit_s: float) -> Any:
        """Return the function's result, or raise CallError; a process that was lost is replaced once."""
        with self._lock:
            for _ in range(2):
                process, self._process = self._process or self._start(), None  # an interrupted call leaves no reply
                assert process.stdin and process.stdout
                try:
                    process.stdin.write(json.dumps([arguments, cpu_limit_s]) + "\n")
                    process.stdin.flush()
                    reply = process.stdout.readline()
                except BrokenPipeError:
                    reply = ""
                if reply:
                    self._process = process
                    result, error = json.loads(reply)
                    if error:
                        raise CallError(error)
                    return result
                process.communicate()  # closes the pipes and waits
                if process.returncode in (-signal.SIGPROF, -signal.SIGALRM):
                    raise CallError(f"more than {cpu_limit_s} s of CPU time, or {_WALL_FACTOR} times as long in all")
        raise CallError(f"the helper process ended twice, the last time with exit code {process.returncode}")

    def _start(self) -> Popen[str]:
        """Start the process; raises ConfigError unless its trial returns true."""
        # The same import path as here: a Ray worker finds this package where its driver put it, not where we are.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = Popen(self._command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True, env=environment)
        found = process.stdout.readline().strip() if process.stdout else ""
        if found != "[true, null]":
            process.kill()
            raise ConfigError(
                f"reward: the helper process for {self._command[-2]} does not start; expected true from its call with "
                f"{self._command[-1]}, found {found or 'no reply'}. Run: pip install -r requirements.txt"
            )
        return process


def serve(function: str, trial: str) -> None:
    """Reply [result, error] to the trial and to each line of standard input, [arguments, CPU limit], until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; its end closes our standard input
    for number in (signal.SIGPROF, signal.SIGALRM):  # end this process, in a long C call too
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})
    replies, sys.stdout = sys.stdout, sys.stderr  # what the function prints is no reply
    module, _, name = function.partition(":")

    def call(arguments: list[Any], cpu_s: float) -> None:
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        signal.setitimer(signal.ITIMER_REAL, _WALL_FACTOR * cpu_s)
        try:
            outcome = [getattr(importlib.import_module(module), name)(*arguments), None]
        except Exception as why:  # MemoryError and RecursionError too
            outcome = [None, f"{type(why).__name__}: {why}"]
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(outcome), file=replies, flush=True)

    call(json.loads(trial), 60.0)
    with open("/proc/self/statm") as statm:
        now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    for line in sys.stdin:
        call(*json.loads(line))


if __name__ == "__main__":
    serve(*sys.argv[1:])
