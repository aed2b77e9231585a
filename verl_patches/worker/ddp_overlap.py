"""Gradients reduced under the backward pass: recipe.train.grad_overlap (line a3).

Megatron's training loop gives the schedules DDP's no_sync (megatron/training/training.py:994); verl has a loop of its
own and does not. A bucket's reduction starts in the last micro batch's backward, once all its gradients are there;
Megatron's finalize_model_grads, which verl's actor calls, waits for it. Only the first pipeline stage has several
buckets (distributed_data_parallel.py:64), as others wait for it anyway.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any


def overlapping_ddp(original: type) -> type:
    """Row provider for verl's name of Megatron's DDP: with recipe.train.grad_overlap it starts reductions early."""

    @functools.wraps(original, updated=())
    class OverlappingDDP(original):
        def __init__(self, config: Any, ddp_config: Any, module: Any, disable_bucketing: bool = False):
            from megatron.training import get_args

            args = get_args()
            if not args.overlap_grad_reduce:
                super().__init__(config, ddp_config, module, disable_bucketing)
                return
            overlapping = {"overlap_grad_reduce": True, "bucket_size": args.ddp_bucket_size}
            super().__init__(config, dataclasses.replace(ddp_config, **overlapping), module, disable_bucketing)
            config.no_sync_func = self.no_sync  # the schedules enter it for all micro batches but the last

    return OverlappingDDP
