"""Ray on this node, which is number i of the job's n: start it, wait for the others, look at it, end it.

The record of what was started is <job.folder>/node-<rank>.json. Each process that is started has MARK in its
environment with a value of its own, so `down` ends those processes and what they started, and no others.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from verl_patches.cluster.job import MASTER, Job
from verl_patches.cluster.place import Place
from verl_patches.config.environment import DROPPED
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.patching.report import Finding
from verl_patches.patching.switches import VARIABLE
from verl_patches.platform.npu import SOCKETS
from verl_patches.platform.npu.machine import preload, start_notes
from verl_patches.processes import (
    Descendants,
    SharedMemory,
    adopting_orphans,
    end_processes,
    is_gone,
    name_of,
    on_end_signals,
    started_at,
    state_of,
    taken_by,
)
from verl_patches.ray_nodes import CALL_S, JOB, RANK_LABEL, ask_nodes, ray_start
from verl_patches.shared_files import LOCK, locked_folder, write_whole

MARK = "CLUSTER_NODE_MARK"
RAY_TEMP = "ray"  # below the job's folder: Ray's sockets and logs
COMMAND_FILES = "command*"  # there too, of command.py
ALREADY = "is up already"  # in what `up` says where an earlier one has started this node
CONNECT_S, POLL_S, START_S = 3.0, 1.0, 120.0
END_HOLDER_S = 60.0  # for another `cluster` command to end what it has started


@dataclass(frozen=True)
class Started:
    """What was started on a node; processes: [{pid, started, name}], see processes.started_at."""

    job: str
    digest: str
    rank: int
    head: str
    address: str
    mark: str
    started: float
    processes: list[dict[str, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """ "node 3 (10.0.0.4)"."""
        return f"node {self.rank} ({self.address})"


def up(job: Job, place: Place, secrets: Mapping[str, str], say: Callable[[str], None]) -> Started:
    """Start Ray on this node unless the job has done so, and wait until all nodes of the job are in.

    Raises ConfigError where another job, or a port that something else holds, is in the way, and RecipeError where
    nodes are missing at the end of job.wait_s. Then no process that was started here is left; Ray's logs stay for
    `cluster down`.
    """
    end = time.monotonic() + job.wait_s
    folder = _folder(job)
    with one_command_in(folder):
        started = _already(job, place, folder)
        new = started is None
        if started is None:
            _require_free_ports(job, place)
            if place.rank:
                _wait_for_head(job, place, end, say)
            for note in start_notes({**os.environ, **job.env}, job.device == "NPU"):
                say(f"{job.host_of(place.rank)}: {note}")
            say(f"{job.host_of(place.rank)}: starting Ray, address {place.address}, head {place.head}")
            started = _start(job, place, secrets, folder)
        else:
            say(f"{started.name} of job {job.name} {ALREADY}: nothing was started")
    try:
        _wait_for_all(job, place, end)
    except BaseException:
        if new:
            down(job, place.rank, keep_logs=True)
            say(f"{started.name}: Ray is ended; its logs stay in {folder}, and cluster down copies them")
        raise
    say(f"{started.name}: all {job.nodes} nodes of job {job.name} are in Ray at {place.head}:{job.ports.gcs}")
    return started


def _folder(job: Job) -> Path:
    """The job's folder on this node, for this user alone."""
    folder = Path(job.folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise OSError(0, "it belongs to another user")
    except OSError as error:
        raise ConfigError(f"folder {folder}: expected a folder of this user, found: {error.strerror}") from None
    return folder


@contextmanager
def one_command_in(folder: Path, ends_holder: bool = False) -> Iterator[None]:
    """One `cluster` command at a time in a folder. ConfigError while another one is at work there.

    `ends_holder`: that one is ended first; RecipeError where it cannot be.
    """
    deadline, asked = time.monotonic() + (END_HOLDER_S if ends_holder else 0.0), None

    def busy() -> Exception | None:
        nonlocal asked
        holder = _holder_of(folder / LOCK)
        if ends_holder and holder is not None and holder != asked:
            with suppress(psutil.NoSuchProcess):
                holder.terminate()  # it ends what it has started
            asked = holder
        if time.monotonic() < deadline:
            time.sleep(0.1)
            return None
        text = f"another `cluster` command{f' (pid {holder.pid})' if holder else ''} is at work in {folder}"
        if ends_holder:
            return RecipeError(f"{text} and could not be ended within {END_HOLDER_S:g} s: end it by hand")
        return ConfigError(f"{text}; wait for its end")

    with locked_folder(folder, busy, lambda error: ConfigError(f"folder {folder}: {error.strerror}")) as lock:
        lock.truncate(0)
        lock.write(str(os.getpid()).encode())
        try:
            yield
        finally:
            lock.truncate(0)


def _holder_of(lock: Path) -> psutil.Process | None:
    """The `cluster` command that has the lock, by the number in the file."""
    with suppress(psutil.Error, ValueError):
        process = psutil.Process(int(lock.read_text()))
        return process if "cluster" in process.cmdline() else None
    return None


def records(folder: Path) -> list[Started]:
    """What was started here, by rank."""
    known = [Started(**json.loads(path.read_text())) for path in folder.glob("node-*.json")]
    return sorted(known, key=lambda started: started.rank)


def of_job(job: Job, rank: int | None = None) -> list[Started]:
    """What was started here for the job, of all ranks or of one."""
    return [each for each in records(Path(job.folder)) if each.job == job.name and rank in (None, each.rank)]


def _already(job: Job, place: Place, folder: Path) -> Started | None:
    """This job's own record where all its processes live; ConfigError for another job's or a partly dead one."""
    for started in records(folder):
        alive = living(started)
        mine = started.job == job.name and started.rank == place.rank
        if not alive:
            if mine:  # Ray's logs stay for `cluster down`
                (folder / f"node-{started.rank}.json").unlink()
            continue
        if started.job != job.name or started.digest != job.digest:
            raise ConfigError(
                f"{started.name} of job {started.job} ({started.digest}) is up in {folder}, and this is job {job.name} "
                f"({job.digest}): end the first (cluster down), or give this one another folder and ports"
            )
        if mine:
            if gone := ended(started):
                lost = ", ".join(gone)
                raise RecipeError(f"{started.name} {ALREADY}, but lost {lost}: `cluster down` first, then `cluster up`")
            return started
    return None


def _require_free_ports(job: Job, place: Place) -> None:
    """ConfigError that names the service and the process for each port of the plan that is taken."""
    taken = []
    for name, (first, last) in job.port_plan.spans(head=place.rank == 0).items():
        if first != last:
            continue  # Ray takes a free one of its workers' ports
        if holder := taken_by(first, ("0.0.0.0", place.address)):
            taken.append(f"{first} ({name}) by {holder}")
    if taken:
        raise ConfigError(
            f"{job.host_of(place.rank)}: port {'; port '.join(taken)}; nothing was started. End that process, or give "
            "other ports (ports.gcs, ports.first)"
        )


def _wait_for_head(job: Job, place: Place, end: float, say: Callable[[str], None]) -> None:
    """Wait for the port of Ray's head; RecipeError at the end of the time."""
    fault = _unreachable(place.head, job.ports.gcs)
    if fault:
        say(f"{job.host_of(place.rank)}: waiting for Ray's head {place.head}:{job.ports.gcs} ({fault})")
    while fault:
        if time.monotonic() >= end:
            raise RecipeError(
                f"{job.host_of(place.rank)}: Ray's head {place.head}:{job.ports.gcs} did not answer within "
                f"{job.wait_s:g} s ({fault}): start node rank 0 there (cluster up --node-rank 0), or correct {MASTER}"
            )
        time.sleep(POLL_S)
        fault = _unreachable(place.head, job.ports.gcs)


def _unreachable(host: str, port: int) -> str:
    """Why no connection can be made; empty where one can."""
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ""
    except OSError as error:
        return error.strerror or str(error) or type(error).__name__


def node_environment(job: Job, secrets: Mapping[str, str], mark: str) -> dict[str, str]:
    """The environment of Ray and of the job's command on this node."""
    dropped = {*DROPPED} - {VARIABLE}
    base = {name: value for name, value in os.environ.items() if name not in dropped}
    sockets = {name: form.format(job.interface) for name, form in SOCKETS.items()} if job.interface else {}
    base.update({**sockets, **job.env, **secrets, MARK: mark})
    if job.device == "NPU" and "LD_PRELOAD" not in job.env and (libraries := preload(base)):
        base["LD_PRELOAD"] = libraries
    base["PYTHONPATH"] = os.pathsep.join(filter(None, [job.python_path, base.get("PYTHONPATH")]))
    base["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)])
    return base


def start_words(job: Job, place: Place) -> list[str]:
    """This node's `ray start`."""
    labels = {JOB: job.name, RANK_LABEL: str(place.rank)}
    temp, device = str(Path(job.folder) / RAY_TEMP), {job.device: job.dies}
    return ray_start(
        place.head, place.address, place.rank == 0, device, job.port_plan, job.dashboard, labels, temp_dir=temp
    )


def _start(job: Job, place: Place, secrets: Mapping[str, str], folder: Path) -> Started:
    """Start Ray and record its processes; RecipeError, with what was started ended, where that fails."""
    mark = f"{job.name}-{place.rank}-{uuid.uuid4().hex}"
    started = Started(job.name, job.digest, place.rank, place.head, place.address, mark, time.time())
    _write(folder, started)  # first: from here on `down` ends what has the mark
    try:
        fault, processes = _ray(start_words(job, place)[1:], node_environment(job, secrets, mark))
        started = Started(**{**asdict(started), "processes": processes})
        _write(folder, started)
        if fault:
            raise RecipeError(f"{started.name}: Ray could not be started: {fault}")
    except BaseException:
        down(job, place.rank, locked=True, keep_logs=True)
        raise
    return started


def _ray(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, list[dict[str, Any]]]:
    """(why Ray did not start or "", the processes that it left running) of one `ray` command."""
    command, fault = [sys.executable, "-m", "ray.scripts.scripts", *words], ""
    with adopting_orphans():
        descendants = Descendants()
        try:
            done = subprocess.run(
                command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=START_S
            )
            fault = "" if done.returncode == 0 else _last_lines(done.stdout + done.stderr)
        except subprocess.TimeoutExpired:
            fault = f"`ray start` did not end within {START_S:g} s"
        # those that Ray starts itself, which became this process's own; what they start comes and goes
        alive = descendants.alive()
        own = [process for process in psutil.Process().children() if process in alive]
        processes = [{"pid": p.pid, "started": started_at(p.pid), "name": name_of(p)} for p in own]
    if not fault and not any(process["name"] == "raylet" for process in processes):
        fault = "`ray start` ended without a raylet"
    return fault, processes


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[-3:])[:600] or "no message"


def _write(folder: Path, started: Started) -> None:
    write_whole(folder / f"node-{started.rank}.json", json.dumps(asdict(started), indent=1) + "\n")


def _wait_for_all(job: Job, place: Place, end: float) -> None:
    """RecipeError that names the nodes which are not in Ray at the end of the time, each with the reason."""
    if missing := missing_nodes(job, members(job, place.head, job.nodes, max(0.0, end - time.monotonic()))):
        raise RecipeError(
            f"{len(missing)} of {job.nodes} nodes of job {job.name} are not in Ray after {job.wait_s:g} s: "
            + "; ".join(missing.values())
        )


def members(job: Job, head: str, nodes: int = 0, limit_s: float = 0.0) -> list[dict[str, Any]]:
    """All nodes that Ray's head knows, after waiting for so many of the job; RecipeError where it does not answer."""
    request = {"address": f"{head}:{job.ports.gcs}", "job": job.name, "nodes": nodes, "limit_s": limit_s}
    return ask_nodes(request, limit_s + CALL_S)["nodes"]


def missing_nodes(job: Job, nodes: Sequence[Mapping[str, Any]]) -> dict[int, str]:
    """{rank: the node and why it is not in Ray}; nodes: as `members`."""
    of_job = [node for node in nodes if node["job"] == job.name]
    alive = {node["rank"] for node in of_job if node["alive"]}
    dead = {node["rank"]: node for node in of_job if not node["alive"]}
    missing = {}
    for rank in sorted(set(range(job.nodes)) - alive):
        if rank in dead:
            missing[rank] = f"node {rank} ({dead[rank]['address']}) was in, then its raylet ended or lost the network"
        elif rank < len(job.hosts):
            fault = _unreachable(job.hosts[rank], job.ports.first)
            why = f"of its raylet: {fault}" if fault else "answers, but it is not in this Ray: has it another head?"
            missing[rank] = f"{job.host_of(rank)}: port {job.ports.first} {why}"
        else:
            missing[rank] = f"node {rank} never joined: cluster up --node-rank {rank}, on its machine"
    return missing


def living(started: Started) -> list[psutil.Process]:
    """The processes of a node that live: those recorded, those that they started, and those with its mark."""
    processes: dict[int, psutil.Process] = {}
    for entry in started.processes:
        process = recorded_process(entry)
        if process is not None:
            processes[process.pid] = process
            with suppress(psutil.NoSuchProcess):
                processes.update({child.pid: child for child in process.children(recursive=True)})
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid not in processes and process.environ().get(MARK) == started.mark:
                processes[process.pid] = process
    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}  # `cluster` run by the job's command
    return [process for pid, process in processes.items() if pid not in own and not is_gone(process)]


def recorded_process(entry: Mapping[str, Any]) -> psutil.Process | None:
    """The process of a record {pid, started}, None where it has ended or another one has its number."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(entry["pid"])
        return None if state_of(process.pid, entry["started"]) == "gone" else process
    return None


def ended(started: Started) -> list[str]:
    """ "raylet (pid 7)" for each recorded process that has ended."""
    return [f"{entry['name']} (pid {entry['pid']})" for entry in started.processes if recorded_process(entry) is None]


def down(job: Job, rank: int | None = None, locked: bool = False, keep_logs: bool = False) -> list[str]:
    """End what was started here for the job (`rank`: of one node only), and remove its record and Ray's folder.

    `keep_logs`: both stay, so that another `cluster down` gathers the logs.
    A `cluster` command that is at work for the folder, such as an `up` that waits for the head, is ended first.
    Returns the names of the nodes that had living processes. Raises RecipeError where a process cannot be ended.
    """
    folder = Path(job.folder)
    if not folder.is_dir():
        return []
    stopped = []
    with nullcontext() if locked else one_command_in(folder, ends_holder=True):
        for started in of_job(job, rank):
            if living(started):
                stopped.append(started.name)
            _end(started)
            if not keep_logs:
                (folder / f"node-{started.rank}.json").unlink()
        if not records(folder):
            shutil.rmtree(folder / RAY_TEMP, ignore_errors=True)
            for path in folder.glob(COMMAND_FILES):
                path.unlink()
    return stopped


def _end(started: Started) -> None:
    if left := end_processes(lambda: living(started), SharedMemory()):
        names = ", ".join(f"{name_of(process)} (pid {process.pid})" for process in left)
        raise RecipeError(f"{started.name}: {names} could not be ended; see them with ps, they may wait for a device")


def status(job: Job, rank: int | None = None) -> list[Finding]:
    """One finding of each node that was started here (or of `rank`), and of all nodes as Ray's head knows them."""
    here = of_job(job, rank)
    if not here:
        todo = f"cluster up of job {job.name} on this node"
        return [Finding("this node", "problem", job.folder, "Ray, started by cluster up", "nothing was started", todo)]
    findings = []
    for started in here:
        gone = ended(started)
        said = f"ended: {', '.join(gone)}" if gone else f"{len(living(started))} processes"
        expected, todo = "all that was started runs", "cluster down, then cluster up; Ray's logs say why"
        findings.append(Finding(started.name, "problem" if gone else "fine", "", expected, said, todo if gone else ""))
    address = f"{here[0].head}:{job.ports.gcs}"
    try:
        missing = missing_nodes(job, members(job, here[0].head))
    except RecipeError as error:
        todo = "cluster status there"
        return [*findings, Finding("nodes", "problem", address, "Ray's head answers", str(error), todo)]
    said = "; ".join(missing.values()) or f"{job.nodes} nodes"
    todo = "cluster up on those nodes" if missing else ""
    state = "problem" if missing else "fine"
    return [*findings, Finding("nodes", state, address, f"{job.nodes} nodes in Ray", said, todo)]


def stay(job: Job, started: Started) -> int:
    """Wait until a signal ends this command, which is 0, or a process of this node ends, which is 1."""
    received: list[int] = []
    on_end_signals(received.append)  # for good: a second one must not keep the caller from its cleanup
    while not received:
        if gone := ended(started):
            raise RecipeError(f"{started.name} of job {job.name} lost {', '.join(gone)}")
        time.sleep(POLL_S)
    return 0
