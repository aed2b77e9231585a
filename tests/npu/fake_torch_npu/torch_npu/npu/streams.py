"""torch_npu.npu.streams."""

from verl_patches.platform.cpu.torch_on_cpu import Event, Stream  # noqa: F401
