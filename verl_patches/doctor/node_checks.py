"""What a node must have before a run: one table of checks, made on the node itself; nothing is started or changed.

A check gets a Node and yields what it saw. `doctor` makes all of them on every node (doctor/doctor.py compares nodes);
the start of a run makes those that refuse it, by the same functions. Rows about dies are in npu_checks.py.
"""

from __future__ import annotations

import json
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from verl_patches.config import hccl
from verl_patches.config.files import Need, disk_detail, disk_fault, disk_needs
from verl_patches.errors import ConfigError, RecipeError, fault_of
from verl_patches.launch.ray_cluster import object_store_bytes
from verl_patches.launch.run_folder import require_lasting_folders, require_output_folder
from verl_patches.patching.contract import Sources, check
from verl_patches.patching.report import NOT_RUN, Finding
from verl_patches.patching.spec import PatchSpec
from verl_patches.planning.plan import host_bytes
from verl_patches.platform import NO_DEVICE
from verl_patches.platform import require as require_platform
from verl_patches.platform.npu import SOCKETS, refuse_loopback, require_interface, towards
from verl_patches.platform.npu.machine import INSTALL_JEMALLOC, preload, stale_locks
from verl_patches.platform.npu.npu_tools import NotUnderstoodError
from verl_patches.processes import taken_by
from verl_patches.spec import Rules, RunSpec
from verl_patches.upstream import versions
from verl_patches.upstream.checkouts import LINE
from verl_patches.upstream.modified import roots_of, source_findings
from verl_patches.upstream.pins import load_pins

TOOL_S, PROBE_S = 30, 150
_OF_GLOO = "GLOO_SOCKET_IFNAME"
MODEL = "actor_rollout_ref.model.path"
GIB, GB = 1 << 30, 1e9
# files and processes: 16 workers with Ray's and HCCL's sockets and some hundred threads each; on a CPU a tiny run
OPEN_FILES, PROCESSES = {True: 65536, False: 4096}, {True: 65536, False: 2048}
FREE_BYTES = {True: 20 * GIB, False: GIB}  # of a folder for logs and sockets
PROBE_MIB, PROBE_REPEAT = 16, 3
_CONTAINER = "bash scripts/start_container.sh sets it"


def run_tool(command: Sequence[str]) -> tuple[int, str]:
    """(exit code, output and errors together) of a command; FileNotFoundError where it is not installed."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run(command, **streams, text=True, errors="replace", timeout=TOOL_S)
    return done.returncode, done.stdout


@dataclass(frozen=True)
class Machine(versions.Machine):
    """What checks look at; the defaults are this process and this machine."""

    run: Callable[[Sequence[str]], tuple[int, str]] = run_tool
    devices: Path = Path("/dev")
    cgroup: Path = Path("/sys/fs/cgroup")
    proc: Path = hccl.PROC
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit

    def output(self, *command: str) -> str | None:
        """Output and errors of a command; None where it is neither on PATH nor among the driver's tools."""
        for name in (command[0], str(self.ascend / "driver" / "tools" / command[0])):
            with suppress(FileNotFoundError):
                return self.run((name, *command[1:]))[1]
        return None


@dataclass(frozen=True)
class Node:
    """One node and the run it will host.

    rows: the catalogue. rules: the table of rules. head: HOST:PORT of Ray's head, None where no Ray runs. has_model:
    whether the run's model is there already; `smoke` makes its own.
    """

    run: RunSpec
    rows: Sequence[PatchSpec]
    rules: Rules
    machine: Machine = Machine()
    head: str | None = None
    has_model: bool = True

    @property
    def npu(self) -> bool:
        """Whether the run is for NPUs."""
        return self.run.platform == "npu"

    @property
    def nodes(self) -> int:
        """Number of nodes of the run."""
        return self.run.verl.trainer.nnodes

    @property
    def dies(self) -> int:
        """Number of dies of this node that the run takes."""
        return self.run.verl.trainer.n_gpus_per_node

    @cached_property
    def npu_smi(self) -> str | None:
        """The output of `npu-smi info`, which takes seconds; None where it is not installed."""
        return self.machine.output("npu-smi", "info")

    @cached_property
    def interface(self) -> tuple[str, str] | None:
        """(network interface, why) as a worker of this node chooses it; None where Ray's head is not known yet."""
        if own := self.machine.environ.get(_OF_GLOO):  # HCCL's may be a prefix, or name what is not taken
            return own.split(",")[0], f"{_OF_GLOO} of this node's environment"
        if chosen := self.run.recipe.hccl.interface:
            return chosen, "recipe.hccl.interface"
        if self.nodes == 1:
            return "lo", "one node"
        return (towards(self.head), "the route to Ray's head") if self.head else None


@dataclass(frozen=True)
class Result:
    """What a check saw: `ok` is None where it could not be made. Empty texts are those of the row.

    `name`: of a part of the check, such as one die.
    """

    ok: bool | None
    found: str
    expected: str = ""
    todo: str = ""
    name: str = ""
    where: str = ""
    details: tuple[str, ...] = ()
    state: str = ""


class NotRunError(Exception):
    """A check could not be made: why, and what to do about it."""

    def __init__(self, why: str, todo: str = ""):
        super().__init__(why)
        self.todo = todo


@dataclass(frozen=True)
class NodeCheck:
    """One check of doctor: how it is made, what it expects, the severity of a fault, the command that mends it."""

    name: str
    how: str
    expected: str
    todo: str
    results: Callable[..., Iterable[Result]]
    severity: str = "problem"

    def findings(self, *context: Any, npu: bool) -> list[Finding]:
        """The findings of the check; on npu one that could not be made is a problem."""
        seen = []
        try:
            for one in self.results(*context):
                seen.append(one)
        except NotRunError as error:
            seen.append(Result(None, str(error), todo=error.todo))
        except NotUnderstoodError as error:
            seen.append(Result(False, f"not understood: {error}", state="problem"))
        except (ConfigError, RecipeError, OSError, subprocess.SubprocessError) as error:
            seen.append(Result(False, str(error) or type(error).__name__, state="problem"))
        return [self._finding(one, npu) for one in seen]

    def _finding(self, seen: Result, npu: bool) -> Finding:
        state = {True: "fine", False: self.severity, None: "problem" if npu else NOT_RUN}[seen.ok]
        found = f"not run: {seen.found}" if seen.ok is None else seen.found
        todo = "" if state == NOT_RUN else seen.todo or ("" if seen.ok else self.todo)
        name = f"{self.name}: {seen.name}" if seen.name else self.name
        return Finding(name, seen.state or state, seen.where, seen.expected or self.expected, found, todo, seen.details)


# sources


def _platform(node: Node) -> Iterator[Result]:
    platform = node.run.recipe.platform
    fault = fault_of(require_platform, platform)
    yield Result(fault is None, fault or platform)


def _folded(
    findings: Iterable[Finding], what: str, report: str, shown: Collection[str] = ("problem", "note")
) -> Iterator[Result]:
    """The findings in a state of `shown`, each by its name, one line for all that are fine, and one for other notes."""
    fine, notes = [], []
    for one in findings:
        if one.state == "fine":
            fine.append(one)
        elif one.state not in shown:
            notes.append(one)
        else:
            yield Result(False, one.found, one.expected, one.todo, one.name, one.where, one.details, one.state)
    if notes:
        todo = f"python -m verl_patches {report} lists them"
        yield Result(
            True, f"{len(notes)} could be compared in part, or not at all", todo=todo, name="notes", state="note"
        )
    if fine:
        yield Result(True, f"{len(fine)} {what}")


_OTHER_LINE = {  # what to do on a machine of the other line, whose packages stay
    "a3": "leave them: run this in the image of configs/Dockerfile.a3, or on a CPU with --upstream DIR; "
    "doctor deepseekv3_tiny_cpu checks what is here",
    "pypi": "leave them: bash scripts/setup.sh makes an environment of line pypi beside them",
}


def _other_line(node: Node) -> Result | None:
    """What is said once where the installed packages are those of another line, each of which would differ."""
    line = node.run.recipe.line
    other = versions.installed_line(node.machine)
    found, expected = f"the packages of line {other}", f"the packages of line {line}"
    return Result(False, found, expected, _OTHER_LINE[line]) if other not in (None, line) else None


def _pins(node: Node) -> Iterator[Result]:
    line = node.run.recipe.line
    if (other := _other_line(node)) and (node.npu or not node.run.trees.folders):
        yield other
    elif line == LINE and node.run.recipe.platform in NO_DEVICE:  # its packages are an NPU image's
        findings = source_findings(load_pins().line(line), roots_of(line, node.run.trees))
        yield from _folded(findings, "as pinned", "versions")
    else:
        report = versions.compare(line, node.machine, trees=node.run.trees)
        findings = [f for f in report.findings if f.name != "not supported" and f.where != "config"]
        yield from _folded(findings, "as pinned", "versions")


def _drift(node: Node) -> Iterator[Result]:
    if not node.run.trees.folders and (other := _other_line(node)):
        yield Result(None, f"installed are {other.found}", todo="as for pins")
        return
    line = node.run.recipe.line
    roots, pins = roots_of(line, node.run.trees), load_pins().line(line)
    of_package = dict(zip(roots, source_findings(pins, roots), strict=True))
    verified = {package: f"{f.name}, {f.found}" for package, f in of_package.items() if f.state == "fine"}
    sources = Sources(roots, not node.run.trees.folders, versions=pins.packages, verified=verified)
    yield from _folded(check(node.rows, line, sources).findings, "as reviewed", "check", shown=("problem",))


# files


def _files(node: Node) -> Iterator[Result]:
    run = replace(node.run, given=frozenset((MODEL, "recipe.rewards") if node.has_model else ()))
    for found in (each for rule in node.rules.files for each in rule(run)):
        if found.name.startswith(("model", "reward model")):  # `train` looks at what the trainer alone reads
            yield Result(found.ok, found.detail, name=found.name, state="note" if found.ok and found.note else "")


def _disk(node: Node) -> Iterator[Result]:
    temporary = Path(tempfile.gettempdir())
    needs = [
        *disk_needs(node.run),
        Need("temporary", temporary, FREE_BYTES[node.npu], "Ray's sockets and logs", "TMPDIR"),
    ]
    fault = disk_fault(needs)
    yield Result(fault is None, fault or disk_detail(needs), "room for what the run writes")
    fault = fault_of(require_output_folder, node.run)
    yield Result(fault is None, fault or "can be written to", "a folder that can be written to", name="run, writable")
    fault = fault_of(require_lasting_folders, node.run)
    todo = (
        ""
        if fault is None
        else "down.sh, add volumes to the job file, render it again, up.sh (docs/cluster.md#volumes)"
    )
    yield Result(fault is None, fault or "yes", "outlives the container", todo, "run, lasting")


# memory and limits


def _shared_memory(node: Node) -> Iterator[Result]:
    usage, need = shutil.disk_usage("/dev/shm"), object_store_bytes(node.run)
    found = f"{usage.total / GB:.1f} GB, {usage.free / GB:.1f} GB free"
    yield Result(usage.total >= need, found, f"{need / GB:.1f} GB for Ray's object store")


_MEMORY_FILES = (  # limit, use, its parts and the one that is page cache: control groups v2 and v1
    ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat", "total_inactive_file"),
)


def _available_bytes(cgroup: Path) -> int:
    """Memory that this node has left, under the container's limit where it has one (control groups v2, or v1)."""
    available = psutil.virtual_memory().available
    for limit, used, stat, cache in _MEMORY_FILES:
        if (cgroup / limit).is_file() and (cgroup / used).is_file():
            most = (cgroup / limit).read_text().strip()
            if most == "max":
                return available
            lines = (cgroup / stat).read_text().splitlines() if (cgroup / stat).is_file() else []
            cached = int(dict(line.split() for line in lines).get(cache, 0))  # of files, given back when it is needed
            return min(available, int(most) - int((cgroup / used).read_text()) + cached)
    return available


def _host_memory(node: Node) -> Iterator[Result]:
    states, store = host_bytes(node.run), object_store_bytes(node.run)
    need, left = states + store, _available_bytes(node.machine.cgroup)
    expected = (
        f"{need / GB:.1f} GB (modelled): {states / GB:.1f} by the workers, {store / GB:.1f} by Ray's object store"
    )
    yield Result(left >= need, f"{left / GB:.1f} GB available", expected)


def _limits(node: Node) -> Iterator[Result]:
    limit, infinite = node.machine.limit, resource.RLIM_INFINITY
    rules = {
        "open files": (resource.RLIMIT_NOFILE, OPEN_FILES[node.npu]),
        "processes": (resource.RLIMIT_NPROC, PROCESSES[node.npu]),
    }
    if node.npu:
        rules["locked memory"] = resource.RLIMIT_MEMLOCK, infinite
    for name, (number, need) in rules.items():
        soft = limit(number)[0]
        if name == "processes":
            for file in ("pids.max", "pids/pids.max"):
                soft = _under(soft, node.machine.cgroup / file)
        ok = soft == infinite or (need != infinite and soft >= need)
        words = ["unlimited" if value == infinite else str(value) for value in (soft, need)]
        yield Result(ok, words[0], words[1] if need == infinite else f"at least {words[1]}", name=name)


def _under(soft: int, file: Path) -> int:
    """The smaller of a limit and a control group's."""
    try:
        text = file.read_text().strip()
    except OSError:
        return soft
    if text == "max":
        return soft
    return int(text) if soft == resource.RLIM_INFINITY else min(soft, int(text))


def _jemalloc(node: Node) -> Iterator[Result]:
    preloaded = node.machine.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    absent = [file for file in preloaded if "/" in file and not Path(file).exists()]
    named = [file for file in preloaded if "jemalloc" in file]
    if absent:
        yield Result(False, f"LD_PRELOAD names {', '.join(absent)}, which does not exist", state="problem")
    elif node.npu or named:
        there = "" if named else f"; {preload({}) or 'no libjemalloc.so.2'} on this machine"
        yield Result(bool(named), (f"LD_PRELOAD={':'.join(preloaded)}" if preloaded else "LD_PRELOAD is unset") + there)
    else:
        yield Result(True, "not needed on this platform")


def _locks(node: Node) -> Iterator[Result]:
    locks = stale_locks(node.machine.environ)
    for lock in locks:
        yield Result(False, f"held by no process that this user sees: {lock}", todo=f"rm {shlex.quote(str(lock))}")
    if not locks:
        yield Result(True, "none")


# network


def _interface(node: Node) -> Iterator[Result]:
    if node.interface is None:
        states = psutil.net_if_stats()
        up = [name for name in psutil.net_if_addrs() if name != "lo" and states[name].isup]
        found = f"the one towards Ray's head, which is not known before Ray runs; up: {', '.join(up) or 'none'}"
        yield Result(bool(up), found, state="note" if up else "")
        return
    name, why = node.interface
    own = {part: of for of in SOCKETS for part in node.machine.environ.get(of, "").lstrip("=").split(",")}
    faults = (fault_of(refuse_loopback, node.nodes, part, of) for part, of in {**own, name: why}.items())
    fault = next(filter(None, faults), None) or fault_of(require_interface, name, why)
    up = not fault and psutil.net_if_stats()[name].isup
    yield Result(up, fault or f"{name}, by {why}" + ("" if up else ", which is down"))


def _ports(node: Node) -> Iterator[Result]:
    if not node.run.as_npu:
        yield Result(True, "HCCL is not used on this platform")
        return
    ports = hccl.check_ports(node.run, node.machine.proc)
    yield Result(ports.ok, ports.detail, name="HCCL, range")
    first, last = node.run.recipe.hccl.base_port, hccl.host_ports(node.run)[1]
    taken = [port for port in range(first, last + 1) if taken_by(port, ("127.0.0.1", ""))]
    found = f"taken: {', '.join(map(str, taken[:8]))}" if taken else f"{first} to {last} are free"
    todo = f"ss -ltnp 'sport >= :{first} and sport <= :{last}' names the programs; end them, or change recipe.hccl."
    yield Result(not taken, found, f"{first} to {last} free", todo + "base_port", "HCCL, free")


def probe(settings: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, float]:
    """{seconds, bus_bytes_per_s} of platform/all_reduce_probe.py on this node; RecipeError where it fails."""
    command = [sys.executable, "-m", "verl_patches.platform.all_reduce_probe", json.dumps(dict(settings))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_S, env=dict(environ))
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
    if done.returncode or not lines:
        errors = [line for line in done.stderr.splitlines() if line and not line.startswith(" ")]
        raise RecipeError(errors[-1] if errors else f"the probe exited with {done.returncode} and no message")
    return json.loads(lines[0])


def probe_settings(backend: str, ranks: int, interface: str | None, mib: int = PROBE_MIB) -> dict[str, Any]:
    """Settings of `probe` for `ranks` ranks on this node alone."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    known = {"backend": backend, "address": address, "interface": interface, "mib": mib, "repeat": PROBE_REPEAT}
    return {**known, "first": 0, "local": ranks, "world": ranks}


def speed(measured: Mapping[str, float], what: str) -> str:
    """One sentence about a probe's result."""
    return f"{what}: {1e3 * measured['seconds']:.1f} ms, {measured['bus_bytes_per_s'] / GB:.2f} GB/s"


def _gloo(node: Node) -> Iterator[Result]:
    name = node.interface[0] if node.interface else "lo"
    measured = probe(probe_settings("gloo", 2, name), node.machine.environ)
    yield Result(True, speed(measured, f"2 processes, {PROBE_MIB} MiB, {name}"))


HOST_ROWS = (
    NodeCheck("platform", "is torch_npu installed", "what recipe.platform needs",
        "run this in the image of configs/Dockerfile.a3", _platform),
    NodeCheck("pins", "as `versions`: packages, commits, edited files, driver, firmware, CANN, variables",
        "configs/upstream.yaml", "python -m verl_patches versions", _pins),
    NodeCheck("drift", "as `check`: each row's target on disk", "as reviewed",
        "python -m verl_patches check", _drift),
    NodeCheck("files", "headers, sizes and index of the weights",
        "whole files of the planned model", "python -m verl_patches weights verify DIR reads every byte", _files),
    NodeCheck("disk", "free space of the folders", "", "free some, or take another folder: recipe.output_root, "
        "trainer.default_local_dir, TMPDIR", _disk),
    NodeCheck("shared memory", "size of /dev/shm", "", f"docker run --shm-size 256g; {_CONTAINER}", _shared_memory),
    NodeCheck("host memory", "available memory, and the container's limit", "",
        "ps aux --sort -rss | head names the largest programs: end them, or raise docker run --memory", _host_memory),
    NodeCheck("limits", "ulimit, and the container's pids.max", "",
        "docker run --ulimit memlock=-1 --ulimit nofile=1048576:1048576 (scripts/start_container.sh), --pids-limit -1",
        _limits),
    NodeCheck("jemalloc", "LD_PRELOAD", "libjemalloc in LD_PRELOAD",
        f"{INSTALL_JEMALLOC}; up.sh of a job and a run that starts its own Ray preload it", _jemalloc, "note"),
    NodeCheck("extension locks", "`lock` in TORCH_EXTENSIONS_DIR, or ~/.cache/torch_extensions",
        "none that no process holds: every later compilation waits for it",
        "remove it, unless another machine that shares the folder compiles", _locks),
    NodeCheck("interface", "own variables, recipe.hccl.interface, or the route to Ray's head",
        "an interface that is up; not the loopback between nodes",
        "ip -brief address lists them; set recipe.hccl.interface, or HCCL_, GLOO_ and TP_SOCKET_IFNAME", _interface),
    NodeCheck("ports", "sysctl's ephemeral range, and binding each port", "outside the ephemeral range",
        "sysctl -w net.ipv4.ip_local_reserved_ports=61000-61143, or change recipe.hccl.base_port", _ports),
    NodeCheck("gloo", "an all-reduce of 2 processes on this node", "the right sum",
        "ip -brief address; the interface must carry this node's own address", _gloo),
)  # fmt: skip


def check_node(node: Node, rows: Sequence[NodeCheck]) -> list[Finding]:
    """The findings of all node rows on this node, in their order."""
    return [finding for row in rows for finding in row.findings(node, npu=node.npu)]
