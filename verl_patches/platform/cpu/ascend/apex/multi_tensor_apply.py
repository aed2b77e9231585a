"""Stands for `apex.multi_tensor_apply`; MindSpeed's adaptor puts a function of the same contract here."""

from __future__ import annotations

from typing import Any

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


def multi_tensor_applier(op: Any, noop_flag_buffer: Any, tensor_lists: Any, *args: Any) -> Any:
    """Call `op` on all tensors at once, as apex does without its chunks."""
    return op(noop_flag_buffer, tensor_lists, *args)
