"""Stands for `torch_npu.utils.collect_env`."""

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


def get_cann_version() -> str:
    """CANN of the pinned image; MindSpeed's dispatcher takes another path for 8.0.RC2 and older, or unknown ones."""
    return "8.2.RC1"
