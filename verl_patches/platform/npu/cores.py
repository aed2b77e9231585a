"""Bind the worker of each die to its own cores of the host, from the die's NUMA node where the machine reports it.

torch_npu's own CPU_AFFINITY_CONF counts the dies that a process sees, and each of Ray's workers sees one: mode 1 would
bind all of them to all cores, mode 2 the main threads of all to the same five (NPUAffinityController.cpp). Atlas A3
may report no node, or the same for all dies: there each die gets an equal part of the cores in their order, as
vllm-ascend >= 0.18 does (its docs, "CPU Binding").
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from verl_patches.platform.npu.npu_tools import NotUnderstoodError, parse_npu_smi

SYSFS = Path("/sys")
_NPU_SMI_LIMIT_S = 60

log = logging.getLogger(__name__)


def bind_cores(die: str, sysfs: Path = SYSFS) -> str:
    """Bind this process's present and later threads to the cores of `die`, and return a text about the result.

    die: its place among the node's dies (ASCEND_RT_VISIBLE_DEVICES). The text gives the reason where nothing is bound:
    `die` is not one die, the number of dies is unknown, or there are fewer cores than dies.
    """
    try:
        output = subprocess.run(["npu-smi", "info"], capture_output=True, text=True, timeout=_NPU_SMI_LIMIT_S).stdout
        dies = sorted(parse_npu_smi(output).dies, key=lambda each: each.number)
        sets, origin = core_sets(*numa_topology([each.bus for each in dies], sysfs), os.sched_getaffinity(0))
        cores = sets[int(die)]
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # the thread has ended
                os.sched_setaffinity(int(thread), cores)
    except (OSError, subprocess.SubprocessError, NotUnderstoodError, IndexError, ValueError) as error:
        return f"die {die}: not bound to cores: {error}"
    return f"die {die}: bound to {len(cores)} cores from {min(cores)} to {max(cores)}, {origin}"


def numa_topology(buses: Sequence[str], sysfs: Path = SYSFS) -> tuple[list[int | None], dict[int, set[int]]]:
    """Return (NUMA node of each die by its PCI address, None where it is unknown; cores of each node)."""
    nodes = [_numa_node(sysfs / "bus/pci/devices" / bus.lower() / "numa_node") for bus in buses]
    lists = {node: sysfs / f"devices/system/node/node{node}/cpulist" for node in set(nodes) if node is not None}
    return nodes, {node: parse_cores(path.read_text()) for node, path in lists.items() if path.exists()}


def _numa_node(file: Path) -> int | None:
    try:
        node = int(file.read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def parse_cores(text: str) -> set[int]:
    """Return the cores of Linux's text form, such as 0-3,8."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def core_sets(
    nodes: Sequence[int | None], cores: Mapping[int, Collection[int]], allowed: Collection[int]
) -> tuple[list[list[int]], str]:
    """Return (disjoint cores of `allowed` for each die; how they were chosen); ValueError for fewer cores than dies.

    Dies get cores of their NUMA nodes if each die has a node and gets at least half of an equal part; otherwise they
    get equal parts of all cores.
    """
    if len(allowed) < len(nodes):
        raise ValueError(f"found {len(allowed)} allowed cores, expected one or more for each of {len(nodes)} dies")
    known = [node for node in nodes if node is not None]
    near = {node: sorted(set(cores.get(node, ())) & set(allowed)) for node in known}
    least = max(1, len(allowed) // len(nodes) // 2)
    if len(known) < len(nodes) or any(len(near[node]) < least * known.count(node) for node in near):
        parts = _equal_parts(sorted(allowed), len(nodes))
        return parts, "an equal part, as not every die has a NUMA node with enough cores"
    left = {node: iter(_equal_parts(near[node], known.count(node))) for node in near}
    return [next(left[node]) for node in known], "of its NUMA node"


def _equal_parts(cores: list[int], count: int) -> list[list[int]]:
    bounds = [len(cores) * place // count for place in range(count + 1)]
    return [cores[first:last] for first, last in zip(bounds, bounds[1:], strict=False)]
