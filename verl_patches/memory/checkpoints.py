"""Checkpoints find weights and optimizer states on the device, and leave them where they were. No phase of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verl_patches.memory import conduct
from verl_patches.memory.model_places import places_of_model
from verl_patches.memory.movers import Optimizer, Params
from verl_patches.memory.optimizer_places import places_of_optimizer, single_optimizers


def at_save(save_checkpoint: Callable) -> Callable:
    """Row provider for ActorRolloutRefWorker.save_checkpoint, which reads."""
    return _all_there(save_checkpoint, writes=False)


def at_load(load_checkpoint: Callable) -> Callable:
    """Row provider for ActorRolloutRefWorker.load_checkpoint, which writes weights and replaces states."""
    return _all_there(load_checkpoint, writes=True)


def _all_there(original: Callable, writes: bool) -> Callable:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_actor:
            return original(self, *args, **kwargs)
        optimizers = [places_of_optimizer(one) for one in single_optimizers(self.actor_optimizer)]
        # without a conductor verl's own calls bring the weights, and take them away
        models = list(map(places_of_model, self.actor_module)) if conduct.moved_here(self.actor_module) else []
        away = [Params(self.actor_module)] * any(each.away for each in models)
        away += [Optimizer(self.actor_optimizer)] * any(each.away for each in optimizers)
        for mover in away:
            mover.load()
        try:
            return original(self, *args, **kwargs)
        finally:
            for each in models:
                each.written = each.written or writes
            for mover in away:
                mover.offload()
            if writes and _is_to_be_away(self.actor_optimizer):
                Optimizer(self.actor_optimizer).offload()  # states that there were none of before

    return call


def _is_to_be_away(optimizer: Any) -> bool:
    """Whether its states belong on the host now; without a conductor verl's own call takes them there."""
    if any(places_of_optimizer(one).swapped for one in single_optimizers(optimizer)):
        return True
    return conduct.moved_here(optimizer) and not conduct.current().has("optimizer")
