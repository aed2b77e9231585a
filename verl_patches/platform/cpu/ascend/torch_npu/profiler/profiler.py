"""Stands for `torch_npu.profiler.profiler`."""

from __future__ import annotations

from typing import Any

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


def analyse(*args: Any, **kwargs: Any) -> None:
    """Refuses: mindspeed/core/auto_parallel imports it while MindSpeed's adaptor is imported, and never gets here."""
    raise RuntimeError("torch_npu.profiler's analyse was called: there is no NPU whose profile could be read")
