"""Stands for `acl`, CANN's own Python package: what MindSpeed's expert layers ask of it.

Nothing else is here on purpose: Ray counts devices through acl.rt, and there are none.
"""

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


def get_soc_name() -> str:
    """Name of an Atlas A3 die; MindSpeed looks for 910B in it (mindspeed/core/transformer/moe/layers.py:127)."""
    return "Ascend910_9391"
