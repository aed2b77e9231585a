"""Weight sync as verl does it, timed, with the switch `recipe.weight_sync.enabled`.

Switched off, the rollout gets the initial weights and never newer ones: the control run that shows what learning
without weight sync looks like.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any
from verl_patches.memory.counters import timed

def timed_and_switched(original: Callable) -> Callable:
    """Provider for verl's MegatronVLLMShardingManager.__enter__.

    `manager.weight_sync_enabled` comes from the worker's configuration (training/worker.py); without it, sync is on.
    """
    return _switched(original, ("weights",))  # verl's worker wakes the KV cache afterwards (megatron_workers.py:475)


def timed_and_switched_with_cache(original: Callable) -> Callable:
    """The same for verl 54c9b736, whose `__enter__` wakes the KV cache itself."""
    return _switched(original, ("weights", "kv_cache"))


def _switched(original: Callable, tags: Sequence[str]) -> Callable:
    sync = timed("reshard", original)

    @functools.wraps(original)
    def enter(manager: Any) -> Any:
        enabled = getattr(manager, "weight_sync_enabled", True)
        if enabled or not getattr(manager, "weights_synced_once", False):
            manager.weights_synced_once = True
            return sync(manager)  # does not say `filled`: nothing proves that verl's path writes every weight
        return manager.inference_engine.wake_up(tags=list(tags))

    return enter
