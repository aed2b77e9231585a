"""Stands for `torch_npu._C`: the options of an HCCL process group, which take no configuration here.

MindSpeed-LLM asks whether Options has hccl_config before it names its groups (its
core/parallel_state.py:330).
"""

from types import SimpleNamespace

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


class _Options:
    """No group here is HCCL's, so there is nothing to set."""


_distributed_c10d = SimpleNamespace(ProcessGroupHCCL=SimpleNamespace(Options=_Options))
