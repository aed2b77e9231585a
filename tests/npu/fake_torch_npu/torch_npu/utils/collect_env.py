"""torch_npu.utils.collect_env."""

from verl_patches.platform.cpu.ascend.packages import get_cann_version  # noqa: F401
