"""Stands for `apex.optimizers`: MindSpeed's adaptor replaces FusedAdam by its AdamW before Megatron takes it."""

from __future__ import annotations

import torch

from verl_patches.platform.cpu.ascend.missing import refuse_unknown

__getattr__ = refuse_unknown(__name__)


class _NotReplaced(torch.optim.Optimizer):
    def __init__(self, *args, **kwargs):
        raise RuntimeError(
            f"apex.optimizers.{type(self).__name__} was built: its kernel needs a device. On line a3 the optimizer is "
            "MindSpeed's AdamW, put here by its adaptor: import mindspeed.megatron_adaptor before megatron"
        )


class FusedAdam(_NotReplaced):
    """Refuses to be built."""


class FusedSGD(_NotReplaced):
    """Refuses to be built."""
