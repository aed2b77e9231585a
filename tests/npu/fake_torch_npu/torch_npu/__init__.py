"""torch_npu for import proofs without the wheel: the references of the CPU line, in modules that can be imported.

Only names: what is called by itself while upstream is imported is here, the rest refuses.
"""

import torch

torch.utils.rename_privateuse1_backend("npu")
from torch_npu import npu  # noqa: E402

torch._register_device_module("npu", npu)
from verl_patches.platform.cpu.ascend.packages import torch_npu as _references  # noqa: E402

_OWN = ("contrib", "npu", "profiler", "utils")  # modules of this folder
globals().update(
    {
        _name: _value
        for _name, _value in vars(_references).items()
        if _name not in _OWN and (not _name.startswith("__") or _name in ("__getattr__", "__version__"))
    }
)
