"""torch_npu._C._distributed_c10d."""

from verl_patches.platform.cpu.ascend.torch_npu._C import _distributed_c10d

ProcessGroupHCCL = _distributed_c10d.ProcessGroupHCCL
