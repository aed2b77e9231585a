"""Emulate the torch device "npu": its name, where its tensors are, and its memory figures.

The backend PrivateUse1 gets the name "npu", as torch_npu names it. A TorchFunctionMode of the whole process turns
device arguments "npu" and "cuda" into "cpu" and drops pin_memory, so that kernels of the CPU run. On a device
transfer_to_npu gives torch.cuda the functions of torch.npu; here both are those of emulation/cpu/torch_on_cpu.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from verl_patches.emulation.npu import hccl, memory_pool
from verl_patches.emulation.npu.torch_names import DefaultDevice, is_device

CPU = torch.device("cpu")
_FACTORIES = _device._device_constructors


class HostTensorMode(TorchFunctionMode):
    """Turn device arguments into the CPU; count what is made for the device, or of its tensors, as the device's memory.

    What is made with device="cpu" or in pinned memory is not counted.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        kwargs = dict(kwargs or {})
        for_device, for_host = is_device(kwargs.get("device")), kwargs.get("device") == "cpu"
        if for_device:
            kwargs["device"] = CPU
        if any(is_device(arg) for arg in args):
            args, for_device = tuple(CPU if is_device(arg) else arg for arg in args), True
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"], for_host = False, True
        made = func(*args, **kwargs)
        by_default = DefaultDevice.is_device and kwargs.get("device") is None and func in _FACTORIES()
        if not for_host:
            memory_pool.count_storages(made, (*args, *kwargs.values()), for_device or by_default)
        return made


def start(torch_module: Any = None) -> None:
    """Name the backend, register HCCL, enter the mode; call once a process, right after torch is imported."""
    torch.utils.rename_privateuse1_backend("npu")
    torch.distributed.Backend.register_backend(
        "hccl", hccl.create_group_by_options, extended_api=True, devices=["npu", "cpu"]
    )
    HostTensorMode().__enter__()


# -- memory figures ----------------------------------------------------------------------------------------------------

TOTAL_BYTES = 1 << 28  # memory of the device; vLLM gives the share gpu_memory_utilization of it to its KV cache


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return (free, total) bytes, as the driver counts them."""
    return TOTAL_BYTES - memory_pool.used_bytes(), TOTAL_BYTES


def memory_stats(device: Any = None) -> dict[str, int]:
    """Return the figures that NPUWorker reads; the peak is not measured."""
    return {"allocated_bytes.all.peak": 0, "allocated_bytes.all.current": memory_pool.allocated_bytes()}
