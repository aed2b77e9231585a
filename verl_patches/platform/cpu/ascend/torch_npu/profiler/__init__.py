"""Stands for `torch_npu.profiler`: importable, no more; MindSpeed profiles only when told to (--profile)."""

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
