"""torch_npu.profiler.profiler."""

from verl_patches.platform.cpu.ascend.torch_npu.profiler.profiler import analyse  # noqa: F401
