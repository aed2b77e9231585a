"""Where verl 54c9b736's worker and actor meet the engine of line a3: start, optimizer, learning-rate schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


def optimizer_config_of_arguments(original: Callable) -> Callable:
    """Row provider for verl's `init_megatron_optim_config`: every field that Megatron's arguments know, from them."""

    @functools.wraps(original)
    def config(optim_config: Any) -> Any:
        from megatron.core.optimizer import OptimizerConfig
        from megatron.training import get_args

        args = get_args()
        names = (field.name for field in dataclasses.fields(OptimizerConfig))
        return OptimizerConfig(**{name: getattr(args, name) for name in names if hasattr(args, name)})

    return config


def with_lr_schedule(update_policy: Callable) -> Callable:
    """Row provider for MegatronPPOActor.update_policy: Megatron's own scheduler, one step for each call."""

    @functools.wraps(update_policy)
    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        from megatron.training import get_args
        from megatron.training.training import get_optimizer_param_scheduler

        if not hasattr(self, "lr_schedule"):
            self.lr_schedule = get_optimizer_param_scheduler(self.actor_optimizer)  # sets the first step's rate
        metrics = update_policy(self, *args, **kwargs)
        self.lr_schedule.step(increment=get_args().global_batch_size)  # it counts samples
        return metrics

    return update
