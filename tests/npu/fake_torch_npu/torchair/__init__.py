"""torchair for import proofs without the wheel: names, none of which can be called."""

from apex import refused  # a test's too

from torchair import ge  # noqa: F401
from verl_patches.platform.cpu.ascend.packages import refuse_unknown, register_fx_node_ge_converter  # noqa: F401

__getattr__ = refuse_unknown("torchair")
patch_for_hcom = refused("patch_for_hcom")
