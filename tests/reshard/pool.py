"""Gloo ranks that stay: started once, they run one function after another, so that a test costs milliseconds.

    pool = Pool(4)
    results = pool.run(job, argument)    # job(argument) on every rank, by reference: a function of an importable module
    pool.close()

Ranks are forked from a server that has imported torch and started no thread. An error on any rank is raised here as
RankError with that rank's traceback; ranks that do not answer after it, or within the time, are killed, and the next
`run` starts new ones. They end with the process that started them.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_RANK = "gloo_rank"  # __name__ of this file in a rank
_GRACE_S = 5.0  # for the other ranks to answer once one has failed: most have the same error, some wait for it


class RankError(RuntimeError):
    """A rank raised, died or did not answer; the message holds its traceback."""


class Pool:
    """`size` gloo ranks; `timeout_s` is for one job and for one collective in it."""

    def __init__(self, size: int, timeout_s: float = 120.0):
        self.size, self.timeout_s = size, timeout_s
        self._ranks: list[tuple[Any, Connection]] = []

    def run(self, job: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What job(*arguments) returns on each rank, in order of ranks."""
        if not self._ranks:
            self._start()
        for _, pipe in self._ranks:
            pipe.send((job, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        ends = time.monotonic() + self.timeout_s
        while len(answers) < self.size and time.monotonic() < ends:
            waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks) if rank not in answers}
            for pipe in wait(list(waiting), timeout=max(0.0, ends - time.monotonic())):
                rank = waiting[pipe]
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    answers[rank] = (False, f"the process died, exit code {self._exit_code(rank)}")
                if not answers[rank][0]:
                    ends = min(ends, time.monotonic() + _GRACE_S)
        silent = [rank for rank in range(self.size) if rank not in answers]
        failed = {rank: text for rank, (fine, text) in sorted(answers.items()) if not fine}
        if silent or any(process.exitcode is not None for process, _ in self._ranks):
            self._kill(silent)
        if failed or silent:
            texts = [f"rank {rank}:\n{text}" for rank, text in failed.items()]
            raise RankError("\n".join(texts + [f"no answer from ranks {silent}"] * bool(silent)))
        return [answers[rank][1] for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks."""
        for process, pipe in self._ranks:
            pipe.close()  # a rank that reads its end goes
            process.join(5)
        self._kill([])

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        self._folder = tempfile.TemporaryDirectory(prefix="gloo_pool_")
        store = Path(self._folder.name) / "store"
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, str(store), theirs, self.timeout_s)
            run_this_file = (__file__, {"ARGUMENTS": arguments}, _RANK)
            process = context.Process(target=runpy.run_path, args=run_this_file, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _exit_code(self, rank: int) -> int | None:
        self._ranks[rank][0].join(5)
        return self._ranks[rank][0].exitcode

    def _kill(self, silent: list[int]) -> None:
        for rank, (process, pipe) in enumerate(self._ranks):
            if rank in silent and process.exitcode is None:
                os.kill(process.pid, signal.SIGUSR1)  # says where it waits, on stderr
                time.sleep(0.2)
            process.kill()
            process.join(5)
            pipe.close()
        if self._ranks:
            self._folder.cleanup()
        self._ranks = []


def _serve(rank: int, size: int, store: str, pipe: Connection, timeout_s: float) -> None:
    # the folder, and not some installed package called tests, which Python would prefer to a folder without __init__
    sys.modules["tests"] = types.ModuleType("tests")
    sys.modules["tests"].__path__ = [str(ROOT / "tests")]
    sys.path.insert(0, str(ROOT))
    import torch
    import torch.distributed as dist

    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size,
                            timeout=timedelta(seconds=timeout_s))  # fmt: skip
    while True:
        try:
            job, arguments = pipe.recv()
        except EOFError:
            return
        try:
            answer = (True, job(*arguments))
        except Exception:
            answer = (False, traceback.format_exc())
        pipe.send(answer)


if __name__ == _RANK:
    _serve(*ARGUMENTS)  # noqa: F821  given by run_path
