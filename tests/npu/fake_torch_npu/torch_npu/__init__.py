"""torch_npu for import proofs without the wheel: the references of the CPU line, in modules that can be imported.

Only names: what is called by itself while upstream is imported is here, the rest refuses.
"""

import torch

torch.utils.rename_privateuse1_backend("npu")
from torch_npu import npu  # noqa: E402

torch._register_device_module("npu", npu)
from verl_patches.platform.cpu.ascend.torch_npu import *  # noqa: E402, F403
from verl_patches.platform.cpu.ascend.torch_npu import __getattr__, __version__  # noqa: E402, F401
