"""Choose code by the kind of device, which is always configured (VERL_PATCHES, `recipe.platform`), never detected."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from verl_patches.errors import ConfigError

NO_DEVICE = ("cpu", "npu_emulated")  # platforms whose tensors are in host memory


def as_npu(platform: str) -> bool:
    """Return whether settings, checks and libraries are those of an NPU."""
    return platform in ("npu", "npu_emulated")


def load_emulation(platform: str) -> ModuleType | None:
    """Return the package that emulates a device, with its ROWS and hooks; None on a platform with a device.

    It is loaded by name and only here, so that runs on a device do not import it. Hooks: require, start_device,
    device_usage, total_usage.
    """
    return importlib.import_module("verl_patches.emulation") if platform in NO_DEVICE else None


def require_platform(platform: str, on_cpu: str = 'set VERL_PATCHES="line=pypi,platform=cpu" on a CPU') -> None:
    """Raise ConfigError where the configured platform cannot work here; torch is not imported.

    on_cpu: says what to do on a machine without NPUs; the default is for the import alone, which has no configuration.
    """
    emulator = load_emulation(platform)
    if emulator is not None:
        emulator.require(platform)
    if platform == "npu" and importlib.util.find_spec("torch_npu") is None:
        raise ConfigError(
            "torch_npu is not installed in this Python; expected it, as platform npu (the default) is configured. "
            f"On an Ascend machine use the torch_npu of the pinned image; {on_cpu}."
        )


def device_module(platform: str) -> ModuleType | None:
    """Return torch's module for the platform's device, torch.npu; None for a CPU, which has no device memory."""
    import torch

    return torch.get_device_module("npu") if as_npu(platform) else None
