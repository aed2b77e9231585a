"""Launch gloo ranks for tests, which run functions and return their results.

    with Ranks(4) as ranks:
        results = ranks.run("tests.reshard.spoilt:with_nan", plan)    # or the function itself, by reference

One process imports torch and forks the ranks. Each rank connects to a socket of this process, runs the functions that
it is sent and answers; its stdout and stderr go to a file. Among the fixtures of tests/conftest.py, `run_ranks` starts
ranks for one function, in forks of the warm interpreter; `ranks4` and `ranks8` are shared by all tests of a session.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_GRACE_S = 5.0  # time for the other ranks to answer once one has failed
HANG_S = 600.0  # a rank or a collective that takes longer is treated as hung


@contextlib.contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port for a server that sets SO_REUSEADDR; it stays bound here, so the kernel gives it to no other."""
    with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind(("", 0))
        yield listener.getsockname()[1]


class RankError(AssertionError):
    """Report that a rank raised, died or did not answer, with its traceback or the end of its output."""


class Ranks:
    """Run functions on `size` ranks; the first `run` starts them, and the next one after a rank has died or hung.

    environment: all variables, by default this process's own. flags: options of the interpreter. prelude: whether ranks
    import the prelude before torch, as workers do. backend: the backend of init_process_group; with None the function
    itself must call `init_group`.
    """

    def __init__(self, size, environment=None, *, flags=(), prelude=False, backend="gloo"):
        self.size = size
        self._environment, self._flags = dict(os.environ if environment is None else environment), flags
        self._setup = (prelude, backend)
        self._pipes: list[Connection] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any] | str, *arguments: Any) -> list[Any]:
        """Return what function(*arguments) returns on each rank, by rank; "module:name" is imported there only."""
        if not self._pipes:
            self._start()
            self._call("tests.ranks:set_up", *self._setup)
        return self._call(function, *arguments)

    def close(self) -> None:
        """End the ranks. Raises RankError if one of them does not end with exit code 0."""
        if not self._pipes:
            return
        for pipe in self._pipes:
            pipe.close()  # a rank ends when it reads the end of its pipe
        try:
            code = self._process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            code = "no exit"
        output = self._output("launcher") if code else ""
        self._kill()
        if code:
            raise RankError(f"ranks ended with {code} after their work:\n{output}")

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        folder = Path(self._folder.name)
        self._reserved = contextlib.ExitStack()
        port = self._reserved.enter_context(reserved_port())
        path = os.pathsep.join(filter(None, [str(ROOT), self._environment.get("PYTHONPATH")]))
        defaults = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        job = {"WORLD_SIZE": str(self.size), "RANKS_FOLDER": str(folder)}
        environment = {**defaults, **self._environment, "PYTHONPATH": path, **job}
        command = [sys.executable, *self._flags, "-W", "ignore", "-c", "from tests.ranks import main; main()"]
        with socket.socket(socket.AF_UNIX) as server, (folder / "launcher").open("wb") as log:
            server.bind(str(folder / "socket"))
            server.listen(self.size)
            server.settimeout(0.1)
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = subprocess.Popen(command, env=environment, cwd=ROOT, **streams, start_new_session=True)
            self._accept(server, time.monotonic() + HANG_S)

    def _accept(self, server: socket.socket, ends: float) -> None:
        found: dict[int, tuple[Connection, int]] = {}
        while len(found) < self.size:
            try:
                pipe = Connection(server.accept()[0].detach())
            except TimeoutError:
                if self._process.poll() is not None or time.monotonic() > ends:
                    output = self._output("launcher")
                    self._kill()
                    raise RankError(f"the ranks did not start:\n{output}") from None
                continue
            rank, process = pipe.recv()
            found[rank] = pipe, process
        self._pipes = [found[rank][0] for rank in range(self.size)]
        self._processes = [found[rank][1] for rank in range(self.size)]

    def _call(self, function: Callable[..., Any] | str, *arguments: Any) -> list[Any]:
        message = pickle.dumps((function, arguments))
        answers: dict[int, tuple[bool, Any]] = {}
        for rank, pipe in enumerate(self._pipes):
            try:
                pipe.send_bytes(message)
            except OSError:
                answers[rank] = (False, "")  # the rank died after its last answer
        dead = set(answers)
        ends = time.monotonic() + (_GRACE_S if dead else HANG_S)
        while len(answers) < self.size and time.monotonic() < ends:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in answers}
            for pipe in wait(list(waiting), timeout=max(0.0, ends - time.monotonic())):
                rank = waiting[pipe]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, "")
                    dead.add(rank)
                if not answers[rank][0]:
                    ends = min(ends, time.monotonic() + _GRACE_S)
        if all(rank in answers and answers[rank][0] for rank in range(self.size)):
            return [answers[rank][1] for rank in range(self.size)]
        texts = self._failures(answers, dead)
        if dead or len(answers) < self.size:
            self._kill()
        raise RankError("\n".join(texts))

    def _failures(self, answers: Mapping[int, tuple[bool, Any]], dead: set[int]) -> list[str]:
        """Return a text for each rank that raised, died or did not answer: its traceback or the end of its output."""
        silent = [rank for rank in range(self.size) if rank not in answers]
        for rank in silent:
            os.kill(self._processes[rank], signal.SIGUSR1)  # faulthandler writes its stack
            self._wait_for("most recent call first", rank)
        for rank in dead:
            self._wait_for(f"rank {rank} ended with", "launcher")
        texts = [f"rank {rank}:\n{text}" for rank, (fine, text) in sorted(answers.items()) if not fine and text]
        texts += [f"rank {rank} died:\n{self._output(rank)}" for rank in sorted(dead)]
        texts += [f"rank {rank} did not answer:\n{self._output(rank)}" for rank in silent]
        if dead:
            texts.append(self._output("launcher"))
        return texts

    def _wait_for(self, words: str, log: int | str) -> None:
        ends = time.monotonic() + HANG_S
        while words not in self._output(log) and self._process.poll() is None and time.monotonic() < ends:
            time.sleep(0.05)

    def _output(self, log: int | str) -> str:
        return Path(self._folder.name, str(log)).read_text(errors="replace")[-6000:]

    def _kill(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # the session holds only processes started here
        self._process.wait()
        self._reserved.close()
        self._folder.cleanup()
        self._pipes = []


def init_group(backend: str = "gloo") -> None:
    """Initialise torch.distributed in a rank; the ranks meet at a file."""
    import torch.distributed as dist

    size, timeout = int(os.environ["WORLD_SIZE"]), timedelta(seconds=HANG_S)
    store = dist.FileStore(str(Path(os.environ["RANKS_FOLDER"], "store")), size)
    dist.init_process_group(backend, store=store, rank=int(os.environ["RANK"]), world_size=size, timeout=timeout)


def set_up(prelude: bool, backend: str | None) -> None:
    """Prepare a rank; this is the first function that it runs."""
    if prelude:
        import verl_patches.prelude_patch  # noqa: F401  before torch, as in a worker
    if backend is not None:
        init_group(backend)


def _serve(rank: int, folder: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    log = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr)
    pipe = Client(str(folder / "socket"))
    pipe.send((rank, os.getpid()))
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            return
        try:
            function, arguments = pickle.loads(message)
            if isinstance(function, str):
                function = pkgutil.resolve_name(function)
            answer = pickle.dumps((True, function(*arguments)))
        except Exception:
            answer = pickle.dumps((False, traceback.format_exc()))
        pipe.send_bytes(answer)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main() -> None:
    """Fork the ranks and wait for them; the exit code is 1 if one of them ended with another code than 0."""
    _die_with_parent()
    folder, ranks = Path(os.environ["RANKS_FOLDER"]), {}
    if "VERL_PATCHES" not in os.environ:
        import torch.distributed  # noqa: F401  once for all ranks
    for rank in range(int(os.environ["WORLD_SIZE"])):
        process = os.fork()
        if process == 0:
            _die_with_parent()
            _serve(rank, folder)
            atexit._run_exitfuncs()
            os._exit(0)  # a regular exit unloads modules, which takes seconds
        ranks[process] = rank
    failed = False
    while ranks:
        process, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        if process in ranks and code:
            print(f"rank {ranks[process]} ended with exit code {code}", flush=True)
            failed = True
        ranks.pop(process, None)
    sys.exit(int(failed))
