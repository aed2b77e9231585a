"""What our recipe adds to verl's ActorRolloutRefWorker: weight-sync mode, proofs before step 1, phase seconds.

Imported only once verl.workers.megatron_workers is (as a provider of catalogue rows).
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register

from verl_patches.memory import phase_clock
from verl_patches.patching import engine


def rollout_with_sync_mode(original: Callable) -> Callable:
    """Provider for _build_rollout: tell the sharding manager whether `recipe.weight_sync.enabled`."""

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        rollout, manager = original(self, *args, **kwargs)
        recipe = self.config.get("recipe")
        manager.weight_sync_enabled = recipe is None or recipe.weight_sync.enabled
        return rollout, manager

    return build


@register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
def prove_patches(self: Any) -> dict[str, Any]:
    """This worker's proof: digest of intent, every row's state, and `error`, why verify refused (None: all active).

    Not blocking: the controller gets one reference a worker and can tell which one has no proof.
    """
    found, error = engine.current(), None
    try:
        found.verify("worker")
    except engine.PatchError as refused:
        error = str(refused)
    where = f"pid {os.getpid()} on {socket.gethostname()}"
    return {"rank": torch.distributed.get_rank(), "where": where, "digest": found.digest(),
            "intent": found.intent(), "status": found.status(), "error": error}


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_phase_seconds(self: Any) -> dict[str, float]:
    """{phase: seconds} of this worker since the last call."""
    return phase_clock.take()
