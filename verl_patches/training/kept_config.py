"""Configurations in which recipe.tensor_cache.enabled cannot hold. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ON = "recipe.tensor_cache.enabled is true, but"
_ROLLOUT, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"


def faults(config: Any) -> Iterator[str]:
    """Why a composed configuration cannot keep its tensors on the workers, one sentence each; none where it is off."""
    if not config.recipe.tensor_cache.enabled:
        return
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if rollout.name != "vllm" or rollout.mode != "sync":
        yield f"{_ON} {_ROLLOUT} is {rollout.name}, {rollout.mode}; only vllm, sync leaves its responses on the workers"
    if rollout.multi_turn.enable:
        yield f"{_ON} {_ROLLOUT}.multi_turn.enable is true: its masks have holes; set false"
    if config.recipe.rollout.replay is not None:
        yield f"{_ON} recipe.rollout.replay gives responses to the trainer alone; set one of them only"
    if actor.shuffle:
        yield f"{_ON} {_ACTOR}.shuffle is true: micro batches would be others than planned; set false"
