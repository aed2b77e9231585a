"""torch_npu.npu, which is torch.npu too."""

from types import SimpleNamespace

from torch_npu.npu import memory, streams  # noqa: F401
from verl_patches.platform.cpu.ascend.packages import npu as _npu

globals().update({name: value for name, value in vars(_npu).items() if name == "__getattr__" or name[:2] != "__"})
config = SimpleNamespace(allow_internal_format=False)


def get_device_name(device=None) -> str:
    """Name of an A3's die; verl looks for "AMD" in it (verl/single_controller/base/worker.py:153)."""
    return "Ascend910_9391"
