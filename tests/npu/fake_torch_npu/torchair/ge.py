"""torchair.ge."""

from verl_patches.platform.cpu.ascend.torchair.ge import DataType, Tensor, TensorSpec, __getattr__  # noqa: F401
