"""What takes the place of a device on platforms `cpu` and `npu_emulated`: test equipment, loaded on these alone.

cpu/: torch.cuda's names, Megatron, vLLM and Ray without an accelerator. ascend/: torch_npu, apex, acl, torchair and
MindSpeed's op builders in plain torch. npu/: a device that is only emulated, so that line a3 runs as on platform npu,
whose rows are on too. op_schemas.py binds each reference to the schema of torch_npu's wheel and counts its calls. Every
stand-in is a row (rows.py). `verl_patches.platform` loads this package by name; the functions below are its hooks. No
torch is imported here.
"""

from __future__ import annotations

import glob
import importlib.util
from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from verl_patches.emulation.rows import ROWS
from verl_patches.errors import ConfigError
from verl_patches.patching.hooks import after_import

__all__ = ["DEVICE_NODES", "ROWS", "called", "require", "start", "summary"]
DEVICE_NODES = "/dev/davinci*"
_EMULATED = "npu_emulated"


def require(platform: str) -> None:
    """ConfigError on npu_emulated where this machine has torch_npu or an Ascend device node; nothing is imported."""
    if platform != _EMULATED:
        return
    found = sorted(glob.glob(DEVICE_NODES))[:3]
    spec = importlib.util.find_spec("torch_npu")
    if spec is not None and spec.origin is not None:  # a stand-in of ours has no file
        found.append(f"torch_npu at {spec.origin}")
    if found:
        raise ConfigError(
            f"platform npu_emulated: expected a machine without an NPU, found {', '.join(found)}. Its numbers are "
            "references in plain torch on a CPU: use recipe.platform=npu on this machine"
        )


def start(platform: str) -> None:
    """On npu_emulated give torch the device, as soon as it is imported; once a process, after the rows are applied."""
    if platform == _EMULATED:
        after_import("torch", _start_device)


def _start_device(torch: ModuleType) -> None:
    from verl_patches.emulation.npu import device

    device.start()


def called(platform: str) -> dict[str, Any] | None:
    """Return what this process used of the emulated device so far; None on platform cpu.

    {functions: {name: calls of a reference}, graphs: number of traced ones, groups: hccl.groups()}.
    """
    if platform != _EMULATED:
        return None
    from verl_patches.emulation import op_schemas  # here: they import torch
    from verl_patches.emulation.npu.hccl import groups
    from verl_patches.emulation.npu.packages import Graphs

    return {"functions": dict(op_schemas.CALLS), "graphs": len(Graphs.traced), "groups": groups()}


def summary(workers: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return, for summary.json, what all workers `called`; None on platform cpu.

    {functions: {name: calls of all}, graphs: of the worker that traced most, groups: of the first worker}.
    """
    found = [worker for worker in workers if worker is not None]
    if not found:
        return None
    calls = sum((Counter(worker["functions"]) for worker in found), Counter())
    graphs = max(worker["graphs"] for worker in found)
    return {"functions": dict(sorted(calls.items())), "graphs": graphs, "groups": found[0]["groups"]}
