"""Platform `npu_emulated`: line a3 as on platform npu, with a device that is only emulated, on a CPU.

The rows of platform npu are on. Rows of its own (rows.py) stand in for the device alone: torch device "npu", torch_npu,
torchair, acl, the C extension of vllm-ascend, HCCL. Every tensor is in host memory and of device "cpu"; an argument
"npu" or "cuda" means the CPU. Functions of torch_npu are references in plain torch, bound to the schemas of its wheel.
It is stated, never chosen by default, and refused where a device may be.
"""

from __future__ import annotations

import glob
import importlib.util

from verl_patches.errors import ConfigError

DEVICE_NODES = "/dev/davinci*"


def refuse_device() -> None:
    """ConfigError where this machine has torch_npu or an Ascend device node; nothing is imported."""
    found = sorted(glob.glob(DEVICE_NODES))[:3]
    spec = importlib.util.find_spec("torch_npu")
    if spec is not None and spec.origin is not None:  # a stand-in of ours has no file
        found.append(f"torch_npu at {spec.origin}")
    if found:
        raise ConfigError(
            f"platform npu_emulated: expected a machine without an NPU, found {', '.join(found)}. Its numbers are "
            "references in plain torch on a CPU: use recipe.platform=npu on this machine"
        )
