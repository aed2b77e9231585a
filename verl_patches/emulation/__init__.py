"""Emulate the accelerator on platforms `cpu` and `npu_emulated`: test equipment, loaded on these two alone.

cpu/ makes torch.cuda's names, Megatron, vLLM and Ray work without an accelerator. ascend/ holds torch_npu, apex, acl,
torchair and MindSpeed's op builders; their operators are those of verl_patches/reference. npu/ emulates a device, so
that line a3 runs as on platform npu, whose patches are applied too. op_schemas.py binds each reference to the schema in
torch_npu's wheel and counts its calls. Every stand-in is a row of the patch table (rows.py). `verl_patches.platform`
loads this package by name and calls the functions below. This module imports no torch.
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

__all__ = ["DEVICE_NODES", "ROWS", "device_usage", "require", "start_device", "total_usage"]
DEVICE_NODES = "/dev/davinci*"
_EMULATED_NPU = "npu_emulated"


def require(platform: str) -> None:
    """Raise ConfigError on npu_emulated if this machine has torch_npu or an Ascend device node; import nothing."""
    if platform != _EMULATED_NPU:
        return
    found = sorted(glob.glob(DEVICE_NODES))[:3]
    spec = importlib.util.find_spec("torch_npu")
    if spec is not None and spec.origin is not None:  # our own stand-in has no file
        found.append(f"torch_npu at {spec.origin}")
    if found:
        raise ConfigError(
            f"platform npu_emulated: expected a machine without an NPU, found {', '.join(found)}. The emulation "
            "computes on the CPU; use recipe.platform=npu on this machine"
        )


def start_device(platform: str) -> None:
    """Add the device to torch on npu_emulated, as soon as torch is imported; call once a process, after the patches."""
    if platform == _EMULATED_NPU:
        after_import("torch", _add_device)


def _add_device(torch: ModuleType) -> None:
    from verl_patches.emulation.npu import device

    device.start()


def device_usage(platform: str) -> dict[str, Any] | None:
    """Return how this process has used the emulated device so far; None on platform cpu.

    The keys are functions ({name: calls of the reference}), graphs (how many were traced), groups (group_configs()).
    """
    if platform != _EMULATED_NPU:
        return None
    from verl_patches.emulation import op_schemas  # here: they import torch
    from verl_patches.emulation.npu.hccl import group_configs
    from verl_patches.emulation.npu.packages import Graphs

    return {"functions": dict(op_schemas.CALL_COUNTS), "graphs": len(Graphs.traced), "groups": group_configs()}


def total_usage(workers: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Return the sum of all workers' `device_usage` for summary.json; None on platform cpu.

    functions adds up the calls of all workers, graphs is the largest count of a worker, groups the first worker's.
    """
    found = [worker for worker in workers if worker is not None]
    if not found:
        return None
    calls = sum((Counter(worker["functions"]) for worker in found), Counter())
    graphs = max(worker["graphs"] for worker in found)
    return {"functions": dict(sorted(calls.items())), "graphs": graphs, "groups": found[0]["groups"]}
