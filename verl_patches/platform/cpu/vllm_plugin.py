"""Entries for vLLM's own registries: light, because vLLM is half imported when they are read."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def rollout_cpu_platform() -> str:
    """Qualified name of the platform class, as vLLM's platform plugins give it; stated, not detected."""
    return "verl_patches.platform.cpu.vllm_platform.RolloutCpuPlatform"


def platform_plugins() -> dict[str, Callable[[], str]]:
    """{"cpu": plugin}: takes the place of vLLM's own CPU entry, which looks for "cpu" in the package's version."""
    return {"cpu": rollout_cpu_platform}


def inspect_in_process(self: Any) -> Any:
    """_LazyRegisteredModel.inspect_model_cls without a second interpreter (upstream fears an early CUDA context)."""
    registry = sys.modules[type(self).__module__]
    return registry._ModelInfo.from_model_cls(self.load_model_cls())
