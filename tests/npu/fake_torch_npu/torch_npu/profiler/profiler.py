"""torch_npu.profiler.profiler."""

from verl_patches.platform.cpu.ascend.packages import analyse  # noqa: F401
