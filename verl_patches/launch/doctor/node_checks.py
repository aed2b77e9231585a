"""Check one node before a run, on the node itself, by a table of checks that start and change nothing.

A check gets a Node and yields what it saw, within CHECK_S: a tool, a driver or a file system that hangs fails only its
own row. npu_checks.py has the rows about dies, doctor.py those that need several nodes.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Thread
from typing import Any

import psutil

from verl_patches.errors import config_error_text, our_command
from verl_patches.patching.report import NOT_RUN, Finding
from verl_patches.plan.memory_plan import node_host_bytes
from verl_patches.plan.step_plan import disk_figures
from verl_patches.platform.npu import interface_towards, refuse_loopback, require_interface
from verl_patches.processes import port_holder
from verl_patches.run import hccl
from verl_patches.run.files import DiskNeed, disk_detail, disk_fault, disk_needs
from verl_patches.shared_files import disk_folder
from verl_patches.spec import RunSpec
from verl_patches.upstream import versions
from verl_patches.upstream.pins import load_pins

TOOL_S = 30
CHECK_S = 200  # limit of one check
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
GIB, GB = 1 << 30, 1e9
# {on npu: least limit}; on npu 16 workers have Ray's and HCCL's sockets and some hundred threads each
OPEN_FILES, PROCESSES = {True: 65536, False: 4096}, {True: 65536, False: 2048}
FREE_BYTES = {True: 20 * GIB, False: GIB}  # {on npu: bytes} of free space in a folder for logs and sockets
RATE_BYTES = {True: GIB, False: GIB // 16}  # {on npu: bytes} of the file that a disk's speed is measured with


def run_tool(command: Sequence[str]) -> str:
    """Return output and errors of a command; FileNotFoundError without it, TimeoutExpired after a limit."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, **streams, text=True, errors="replace")
    try:
        return process.communicate(timeout=TOOL_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # do not wait: a process that hangs in its driver does not end
        raise


@dataclass(frozen=True)
class Machine(versions.Machine):
    """Hold what checks look at; the defaults are this process and this machine."""

    run: Callable[[Sequence[str]], str] = run_tool
    cgroup: Path = Path("/sys/fs/cgroup")

    def output(self, *command: str) -> str | None:
        """Return what a command prints; None where it is neither on PATH nor among the driver's tools."""
        for name in (command[0], str(self.ascend / "driver" / "tools" / command[0])):
            with suppress(FileNotFoundError):
                return self.run((name, *command[1:]))
        return None


@dataclass(frozen=True)
class Node:
    """Hold one node and the run that it will host. head: HOST:PORT of Ray's head, None where no Ray runs."""

    run: RunSpec
    machine: Machine = Machine()
    head: str | None = None

    @property
    def npu(self) -> bool:
        """Return whether the run is for NPUs."""
        return self.run.platform == "npu"

    @property
    def nodes(self) -> int:
        """Return the number of nodes of the run."""
        return self.run.verl.trainer.nnodes

    @cached_property
    def npu_smi(self) -> str | Exception | None:
        """Return the output of `npu-smi info`, or the error that it ended with; None where it is not installed."""
        try:
            return self.machine.output("npu-smi", "info")
        except (OSError, subprocess.SubprocessError) as error:  # cached: it is not called again
            return error

    @cached_property
    def interface(self) -> tuple[str, str] | None:
        """Return (network interface, reason) as a worker of this node chooses it; None where Ray's head is unknown."""
        if own := self.machine.environ.get(_GLOO_INTERFACE):  # HCCL's variable may be a prefix or an exclusion
            return own.split(",")[0], f"{_GLOO_INTERFACE} of this node's environment"
        if chosen := self.run.recipe.hccl.interface:
            return chosen, "recipe.hccl.interface"
        if self.nodes == 1:
            return "lo", "one node"
        return (interface_towards(self.head), "the route to Ray's head") if self.head else None


@dataclass(frozen=True)
class Result:
    """Hold one result of a check, or of its part `name`; `ok` is None where the check could not be made.

    An empty `expected` or `todo` stands for that of the NodeCheck, an empty `state` for the state that `ok` implies.
    """

    ok: bool | None
    found: str
    expected: str = ""
    todo: str = ""
    name: str = ""
    where: str = ""
    state: str = ""


class NotRunError(Exception):
    """Raised where a check could not be made. Arguments: the reason, and what to do about it where that is known."""


@dataclass(frozen=True)
class NodeCheck:
    """Describe one check of doctor: what it expects, the command that mends a fault, and what makes it."""

    name: str
    expected: str
    todo: str
    results: Callable[..., Iterable[Result]]

    def findings(self, *context: Any, npu: bool) -> list[Finding]:
        """Return the findings of the check, made within CHECK_S; on npu a check that could not be made is a problem."""
        seen: list[Result] = []

        def look() -> None:
            try:
                for one in self.results(*context):
                    seen.append(one)
            except NotRunError as error:
                why, *todo = error.args
                seen.append(Result(None, why, todo="".join(todo)))
            except Exception as error:  # any error is a problem of this check alone: the others still run
                seen.append(Result(False, f"{type(error).__name__}: {error}"))

        thread = Thread(target=look, name=f"doctor: {self.name}", daemon=True)
        thread.start()
        thread.join(CHECK_S)
        if thread.is_alive():
            seen.append(Result(False, f"not finished within {CHECK_S} s: a tool, its driver or a file system hangs"))
        return [self._finding(one, npu) for one in list(seen)]

    def _finding(self, seen: Result, npu: bool) -> Finding:
        state = {True: "fine", False: "problem", None: "problem" if npu else NOT_RUN}[seen.ok]
        found = f"not run: {seen.found}" if seen.ok is None else seen.found
        todo = "" if state == NOT_RUN else seen.todo or ("" if seen.ok else self.todo)
        name = f"{self.name}: {seen.name}" if seen.name else self.name
        return Finding(name, seen.state or state, seen.where, seen.expected or self.expected, found, todo)


def _versions(node: Node) -> Iterator[Result]:
    findings = versions.compare_pins(node.run.line, node.machine, trees=node.run.trees).findings
    if node.run.trees.folders and not node.npu:  # on a CPU only the checkouts of --upstream are of this line
        own = load_pins().line(node.run.line).repositories
        findings = tuple(one for one in findings if one.name in own)
    for one in findings:
        if one.state != "fine" and one.name != "not supported":
            yield Result(False, one.found, one.expected, one.todo, one.name, one.where, one.state)
    yield Result(True, f"{sum(one.state == 'fine' for one in findings)} packages and sources are as pinned")


def _disk(node: Node) -> Iterator[Result]:
    needs = disk_needs(node.run)
    own = DiskNeed("temporary", Path(tempfile.gettempdir()), FREE_BYTES[node.npu], "Ray's sockets and logs", "TMPDIR")
    fault = disk_fault([*needs, own])
    yield Result(fault is None, fault or disk_detail([*needs, own]))
    places = [disk_folder(need.folder) for need in needs]
    for place in {place.stat().st_dev: place for place in places}.values():
        written, read = disk_rates(place, RATE_BYTES[node.npu])
        rates = f"writes {written / GB:.2f} GB/s, reads {read / GB:.2f} GB/s"
        found = f"{rates} (one process, {RATE_BYTES[node.npu] >> 20} MiB)"
        for part, rate in (("save", written), ("load", read)):
            for needed in disk_figures(node.run, node.nodes * rate / GB)["parts"]:
                if needed["part"] == part:
                    found += f"; at {node.nodes} x this a {part} takes {needed['seconds']:.0f} s"
        yield Result(True, found, "a file can be written", name=f"rate in {place}")


def disk_rates(folder: Path, size_bytes: int) -> tuple[float, float]:
    """Return (written, read) bytes/s of a file without a name, which does not remain, in `folder`.

    The file is written to the disk and read from there: the page cache is asked to drop it in between.
    """
    block = os.urandom(min(size_bytes, 8 << 20))
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        start = time.perf_counter()
        for _ in range(size_bytes // len(block)):
            file.write(block)
        os.fsync(file.fileno())
        written = time.perf_counter()
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        file.seek(0)
        while file.read(len(block)):
            pass
        return size_bytes / (written - start), size_bytes / (time.perf_counter() - written)


def available_bytes(cgroup: Path) -> int:
    """Return the bytes of memory that this node has left, or the limit of its container where that is less."""
    available = psutil.virtual_memory().available
    for file in (cgroup / "memory.max", cgroup / "memory" / "memory.limit_in_bytes"):  # control groups v2 and v1
        if file.is_file() and (text := file.read_text().strip()) != "max":
            available = min(available, int(text))
    return available


def _memory(node: Node) -> Iterator[Result]:
    need = node_host_bytes(node.run, psutil.virtual_memory().total)
    store, whole = need["object_store_bytes"], need["node_bytes"]
    least = whole - store
    shared, left = shutil.disk_usage("/dev/shm"), available_bytes(node.machine.cgroup)
    found = f"{shared.total / GB:.1f} GB, {shared.free / GB:.1f} GB free"
    todo = "docker run --shm-size 256g, as scripts/start_container.sh sets"
    yield Result(shared.total >= store, found, f"{store / GB:.1f} GB for Ray's object store", todo, "/dev/shm")
    expected = f"{whole / GB:.1f} GB (modelled): {need['pinned_bytes'] / GB:.1f} by the workers, "
    expected += f"{need['workers_bytes'] / GB:.1f} for their processes, the rest in /dev/shm"
    state = "note" if least <= left < whole else ""
    yield Result(left >= least, f"{left / GB:.1f} GB available", expected, name="host", state=state)


def _limits(node: Node) -> Iterator[Result]:
    infinite, npu = resource.RLIM_INFINITY, node.npu
    rules = {
        "open files": (resource.getrlimit(resource.RLIMIT_NOFILE)[0], OPEN_FILES[npu]),
        "processes": (resource.getrlimit(resource.RLIMIT_NPROC)[0], PROCESSES[npu]),
    }
    if npu:
        rules["locked memory"] = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], infinite
    for file in (node.machine.cgroup / "pids.max", node.machine.cgroup / "pids/pids.max"):  # control groups v2 and v1
        if file.is_file() and (text := file.read_text().strip()) != "max":
            rules["processes of the container"] = int(text), PROCESSES[npu]
    for name, (soft, need) in rules.items():
        found, wanted = ("unlimited" if value == infinite else str(value) for value in (soft, need))
        ok = soft == infinite or (need != infinite and soft >= need)
        yield Result(ok, found, wanted if need == infinite else f"at least {wanted}", name=name)


def _interface(node: Node) -> Iterator[Result]:
    if node.interface is None:
        states = psutil.net_if_stats()
        up = [name for name in psutil.net_if_addrs() if name != "lo" and states[name].isup]
        found = f"not known before Ray runs (that of the route to its head); up: {', '.join(up) or 'none'}"
        yield Result(bool(up), found, state="note" if up else "")
        return
    name, why = node.interface
    fault = config_error_text(refuse_loopback, node.nodes, name, why) or config_error_text(require_interface, name, why)
    if fault:
        yield Result(False, fault)
        return
    state = psutil.net_if_stats()[name]
    yield Result(state.isup, f"{name} ({why}), MTU {state.mtu}" + ("" if state.isup else ", is down"))


def _ports(node: Node) -> Iterator[Result]:
    if not node.run.as_npu:
        yield Result(True, "HCCL is not used on this platform")
        return
    ports = hccl.check_ports(node.run)
    yield Result(ports.ok, ports.detail, name="HCCL, range")
    first, last = hccl.node_ports(node.run)["all"]
    taken = [port for port in range(first, last + 1) if port_holder(port, ("127.0.0.1", ""))]
    found = f"taken: {', '.join(map(str, taken[:8]))}" if taken else f"{first} to {last} are free"
    todo = f"ss -ltnp 'sport >= :{first} and sport <= :{last}' names the programs: end them, or change recipe.hccl."
    yield Result(not taken, found, f"{first} to {last} free", todo + "base_port", "HCCL, free")


HOST_ROWS = (
    NodeCheck("versions", "configs/upstream.yaml", our_command("versions", "--line", "LINE"), _versions),
    NodeCheck("disk", "space for the files that the run writes",
        "free space, or choose another folder: recipe.output_root, trainer.default_local_dir, TMPDIR", _disk),
    NodeCheck("memory", "enough for Ray's object store and the workers",
        "ps aux --sort -rss | head names the largest programs: end them", _memory),
    NodeCheck("limits", "at least the minimum of the platform",
        "docker run --ulimit memlock=-1 --ulimit nofile=1048576:1048576 (scripts/start_container.sh), --pids-limit -1",
        _limits),
    NodeCheck("interface", "an interface that is up, and not the loopback where the run has several nodes",
        "ip -brief address lists them; set recipe.hccl.interface, or HCCL_, GLOO_ and TP_SOCKET_IFNAME", _interface),
    NodeCheck("ports", "outside the ephemeral range",
        "sysctl -w net.ipv4.ip_local_reserved_ports=61000-61143, or change recipe.hccl.base_port", _ports),
)  # fmt: skip
