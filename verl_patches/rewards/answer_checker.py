"""Compares answers (equivalence.py) in a helper process with limits of CPU time and memory.

The helper is this module run as a program. math-verify bounds its work with SIGALRM, which needs the main thread and
cannot stop one long C call such as 10**10**10; the kernel ends a process at its limit in any case.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time

from verl_patches.current import Current
from verl_patches.errors import ConfigError
from verl_patches.recipe.rewards import CPU_LIMIT_S
from verl_patches.rewards.equivalence import equivalent

MEMORY_BYTES = 1 << 30  # of the helper, on top of its imports
_WALL_FACTOR = 4.0  # limit of a call's wall-clock time over the CPU limit, the start of a helper included
_log = logging.getLogger(__name__)
checkers: Current[dict[int, AnswerChecker]] = Current({})  # by process id: a fork never talks to its parent's helper


class AnswerChecker:
    """One helper process that compares two answers at a time; any thread may call it.

    The helper bounds its own time and memory and ends itself at the limit, so a comparison never hangs. The next
    helper is started at once (about 0.5 s), so that the next call rarely waits for it. The helper also ends when this
    process does, because its standard input then closes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._ready = False  # the helper has sent its greeting

    def equivalent(self, gold: str, answer: str, cpu_limit_s: float = CPU_LIMIT_S) -> bool:
        """Whether the two answers are equal (`equivalence.equivalent`); False where that takes more than `cpu_limit_s`.

        The limit of wall-clock time is 4 times `cpu_limit_s`, less the time for which a helper's start was waited for.

        A helper that ends for another reason is replaced once; answers that end it twice are not equal. Raises
        ConfigError if the helper cannot start, as without math-verify.
        """
        with self._lock:
            start = time.monotonic()
            for _ in range(2):
                process = self._running()
                wall_s = max(cpu_limit_s, _WALL_FACTOR * cpu_limit_s - (time.monotonic() - start))
                try:
                    reply = self._request(process, json.dumps([gold, answer, cpu_limit_s, wall_s]) + "\n")
                except BaseException:  # of a signal's handler: the reply would be read as that of the next request
                    self._drop()
                    raise
                if reply:
                    return bool(json.loads(reply))
                self._drop()
                if process.returncode in (-signal.SIGPROF, -signal.SIGALRM):
                    _log.info(
                        "reward: comparing an answer took more than %s s of CPU time or %.1f s in all; it is wrong",
                        cpu_limit_s,
                        wall_s,
                    )
                    self._start()
                    return False
        _log.warning("reward: the helper process ended twice (last: %s); the answer is wrong", process.returncode)
        return False

    def close(self) -> None:
        """End the helper process, if there is one."""
        with self._lock:
            self._drop()

    @property
    def pid(self) -> int | None:
        """Process id of the helper, None while there is none."""
        return self._process.pid if self._process else None

    def _start(self) -> None:
        # The same import path as here: a Ray worker finds this package where its driver put it, not where we are.
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._ready = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl_patches.rewards.answer_checker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )

    def _running(self) -> subprocess.Popen[str]:
        """The helper, ready for a request."""
        if self._process is None:
            self._start()
        if not self._ready:
            greeting = self._process.stdout.readline()
            if "ready" not in greeting:
                self._drop()
                raise ConfigError(
                    "reward: the helper process that compares answers does not start; expected math-verify and "
                    f"antlr4-python3-runtime 4.9.3, found: {greeting.strip() or 'no output'}. "
                    "Run: pip install -r requirements.txt"
                )
            self._ready = True
        return self._process

    @staticmethod
    def _request(process: subprocess.Popen[str], request: str) -> str:
        """The helper's reply, empty if it has ended."""
        try:
            process.stdin.write(request)
            process.stdin.flush()
        except OSError:
            return ""
        reply = process.stdout.readline()
        if not reply:
            process.wait()  # its own exit code, before _drop kills it
        return reply

    def _drop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()  # closes the pipes and waits


def shared_answer_checker() -> AnswerChecker:
    """This process's checker."""
    return checkers.value.setdefault(os.getpid(), AnswerChecker())


# -- the helper process ----------------------------------------------------------------------------------------------


def _limit_time(cpu_s: float, wall_s: float) -> None:
    """End this process by signal after so much CPU or wall-clock time (0: never), also in a long C call."""
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGALRM})


def _reply(value: object) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def _warm_up() -> None:
    pairs = ((r"\frac{1}{2}", "0.5"), (r"2\sqrt{2}", r"\sqrt{8}"), ("x^2 - 1", "(x-1)(x+1)"))
    for gold, answer in pairs:
        if not equivalent(gold, answer):
            raise RuntimeError(f"{gold} and {answer} differ: wrong versions, see configs/requirements-pypi.txt")


def serve() -> None:
    """Reply true or false to each line of stdin, a JSON list [gold, answer, cpu_s, wall_s], until end of file.

    The first line on stdout is {"ready": true} or {"error": text}.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent; its end closes our stdin
    _limit_time(60.0, 600.0)
    try:
        _warm_up()
    except Exception as why:
        _reply({"error": f"{type(why).__name__}: {why}"})
        return
    with open("/proc/self/statm") as statm:
        now_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    _limit_time(0.0, 0.0)
    _reply({"ready": True})
    for line in sys.stdin:
        gold, answer, cpu_s, wall_s = json.loads(line)
        _limit_time(cpu_s, wall_s)
        try:
            verdict = equivalent(gold, answer)
        except Exception:  # MemoryError and RecursionError too: what cannot be compared is not equal
            verdict = False
        _limit_time(0.0, 0.0)
        _reply(verdict)


if __name__ == "__main__":
    serve()
