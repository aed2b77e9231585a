"""Emulate torch_npu.profiler with torch's own profiler of the CPU, in the folders that torch_npu's makes.

Names of arguments and of files are those of torch_npu 2.5.1.post1 (profiler/profiler.py, _profiler_path_creator.py);
tests/npu compares the arguments with the wheel's. There is no device, so no kernels are in the trace.
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


class ProfilerActivity(enum.Enum):
    """Stand in for torch_npu._C._profiler.ProfilerActivity."""

    CPU = 0
    NPU = 1


class profile:
    """Record between start and stop, as torch_npu.profiler.profile with the arguments of worker/profile.py."""

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity],
        on_trace_ready: Callable[[Any], None],
        record_shapes: bool,
        with_stack: bool,
    ):
        cpu = [torch.profiler.ProfilerActivity.CPU]
        self.on_trace_ready = on_trace_ready
        self.recorded = torch.profiler.profile(activities=cpu, record_shapes=record_shapes, with_stack=with_stack)

    def start(self) -> None:
        """Start recording."""
        self.recorded.start()

    def stop(self) -> None:
        """Stop recording and call `on_trace_ready`."""
        self.recorded.stop()
        self.on_trace_ready(self)


def tensorboard_trace_handler(dir_name: str) -> Callable[[profile], None]:
    """Return a handler that writes <dir_name>/<host>_<pid>_<time>_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json."""

    def handler(profiled: profile) -> None:
        folder = f"{os.uname().nodename}_{os.getpid()}_{time.strftime('%Y%m%d%H%M%S', time.gmtime())}000_ascend_pt"
        output = Path(dir_name) / folder / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        profiled.recorded.export_chrome_trace(str(output / "trace_view.json"))

    return handler
