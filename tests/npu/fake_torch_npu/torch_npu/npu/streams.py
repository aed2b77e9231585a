"""torch_npu.npu.streams."""

from verl_patches.platform.cpu.ascend.streams import Event, Stream  # noqa: F401
