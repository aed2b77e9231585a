"""Exchanges of Megatron's DDP under computation: recipe.train.grad_overlap and param_overlap (line a3).

Megatron's training loop gives the schedules DDP's no_sync and turns the gather's forward hooks on and off around
evaluation (megatron/training/training.py:994, :1147). verl has a loop of its own and does neither:

    gradients   a bucket's reduction starts in the last micro batch's backward, once all its gradients are there;
                Megatron's finalize_model_grads, which verl's actor calls, waits for it. Only the first pipeline stage
                has several buckets (distributed_data_parallel.py:64), as others wait for it anyway.
    parameters  gathered under the forward pass of the next mini batch. The last mini batch has no next one: its
                parameters are gathered before the update returns, as the weight sync and log-probs read them. So this
                acts from the second mini batch of an update on.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from verl_patches.memory.host_backed import single_optimizers


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


def with_param_gather(update_policy: Callable) -> Callable:
    """Row provider for MegatronPPOActor.update_policy: with recipe.train.param_overlap gathers overlap inside it.

    Outside an update optimizers gather as without the key, and no forward hook is installed.
    """

    @functools.wraps(update_policy)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args

        if not get_args().overlap_param_gather:
            return update_policy(self, *args, **kwargs)
        optimizers = single_optimizers(self.actor_optimizer)
        for one in optimizers:
            one.update_successful = False  # nothing to gather before the first step of this update
            one.overlap_param_gather = True
            one.enable_pre_hook()
        metrics = update_policy(self, *args, **kwargs)
        for one in optimizers:
            one.disable_pre_hook()  # gathers what the last step has changed
            one.overlap_param_gather = False
        return metrics

    return update
