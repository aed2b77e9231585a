"""The one table of everything that is replaced upstream, in the order in which a GRPO step meets it.

    rollout -> reward -> ref log-prob -> advantage -> update -> reshard

Rows of platform `cpu` only (stand-ins for what a machine without an accelerator lacks) come last, from platform/cpu/.
"""

from verl_patches.patching.spec import PatchSpec
from verl_patches.platform.cpu import rows_megatron, rows_torch, rows_verl, rows_vllm

FUNCTIONAL: tuple[PatchSpec, ...] = ()

STAND_INS: tuple[PatchSpec, ...] = (*rows_torch.ROWS, *rows_megatron.ROWS, *rows_vllm.ROWS, *rows_verl.ROWS)

ROWS: tuple[PatchSpec, ...] = (*FUNCTIONAL, *STAND_INS)
