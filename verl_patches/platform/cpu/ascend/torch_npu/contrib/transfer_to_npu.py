"""Stands for `torch_npu.contrib.transfer_to_npu`, which makes torch.cuda mean the device when it is imported.

Here torch.cuda means the CPU already (rows_torch.py), and the other things that it does are rows too (rows_npu.py:
torch.jit.script gives back what it is given). So importing this changes nothing.
"""

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
