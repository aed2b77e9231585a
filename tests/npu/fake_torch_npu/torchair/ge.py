"""torchair.ge."""

from verl_patches.platform.cpu.ascend.packages import DataType, Tensor, TensorSpec  # noqa: F401
