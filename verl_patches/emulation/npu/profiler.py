"""torch_npu.profiler on an emulated device: torch's own over the CPU, in the folders that torch_npu's makes.

Signatures and the names of files are those of torch_npu 2.5.1.post1 (profiler/profiler.py, _profiler_path_creator.py);
tests/npu compares the signatures with the wheel's. There is no device, so no kernels are in the trace.
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
    """torch_npu._C._profiler's."""

    CPU = 0
    NPU = 1


class profile:
    """As torch_npu.profiler.profile without a schedule: everything between start and stop is recorded.

    ValueError for a schedule or an experimental configuration, which are not emulated.
    """

    def __init__(
        self,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        schedule: Callable[[int], Any] | None = None,
        on_trace_ready: Callable[..., Any] | None = None,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        with_flops: bool = False,
        with_modules: bool = False,
        experimental_config: Any = None,
        use_cuda: bool | None = None,
    ):
        if schedule is not None or experimental_config is not None:
            raise ValueError("torch_npu.profiler.profile: schedule and experimental_config are not emulated")
        if unknown := set(activities or ()) - set(ProfilerActivity):
            raise ValueError(f"torch_npu.profiler.profile: {unknown} are no ProfilerActivity")
        options = {"record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack}
        more = {"with_flops": with_flops, "with_modules": with_modules}
        cpu = [torch.profiler.ProfilerActivity.CPU]
        self.on_trace_ready, self.recorded = on_trace_ready, torch.profiler.profile(activities=cpu, **options, **more)

    def start(self) -> None:
        """Begin to record."""
        self.recorded.start()

    def stop(self) -> None:
        """End, and call `on_trace_ready`."""
        self.recorded.stop()
        if self.on_trace_ready is not None:
            self.on_trace_ready(self)


def tensorboard_trace_handler(
    dir_name: str | None = None, worker_name: str | None = None, analyse_flag: bool = True, async_mode: bool = False
) -> Callable[[profile], None]:
    """As torch_npu's: writes <dir_name>/<worker>_<pid>_<time>_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json."""

    def handler(profiled: profile) -> None:
        worker = worker_name or os.uname().nodename
        folder = f"{worker}_{os.getpid()}_{time.strftime('%Y%m%d%H%M%S', time.gmtime())}000_ascend_pt"
        output = Path(dir_name or os.getcwd()) / folder / "ASCEND_PROFILER_OUTPUT"
        output.mkdir(parents=True)
        if analyse_flag:
            profiled.recorded.export_chrome_trace(str(output / "trace_view.json"))

    return handler
