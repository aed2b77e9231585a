"""torch_npu._C._distributed_c10d."""

from verl_patches.platform.cpu.ascend.packages import torch_npu

ProcessGroupHCCL = torch_npu._C._distributed_c10d.ProcessGroupHCCL
