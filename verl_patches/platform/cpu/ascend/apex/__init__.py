"""Stands for Ascend's build of apex. Megatron and verl import it; MindSpeed puts its own functions in these places."""

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)
