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

from verl_patches.comm import starts
from verl_patches.layout.parallel import rollout_layout_in, train_layout_in
from verl_patches.memory import moves, phase_clock
from verl_patches.patching import engine
from verl_patches.reshard.in_loop import Settings


def rollout_with_sync_mode(original: Callable) -> Callable:
    """Provider for _build_rollout: tell the sharding manager both layouts and what `recipe` says of the sync."""

    @functools.wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> Any:
        rollout, manager = original(self, *args, **kwargs)
        recipe = self.config.get("recipe")
        manager.weight_sync_enabled = recipe is None or recipe.weight_sync.enabled
        manager.reshard_settings = None if recipe is None else _reshard_settings(self.config, recipe)
        return rollout, manager

    return build


def _reshard_settings(section: Any, recipe: Any) -> Settings:
    world = torch.distributed.get_world_size()
    return Settings(
        train_layout_in(section, recipe, world), rollout_layout_in(section, recipe, world), recipe.line,
        recipe.reshard.bucket_bytes, recipe.reshard.verify,
    )  # fmt: skip


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


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_sync_reports(self: Any) -> list[dict[str, Any]]:
    """What each weight sync of this worker did since the last call (reshard/in_loop.py); empty on verl's own path."""
    resharder = getattr(getattr(self, "sharding_manager", None), "resharder", None)
    return resharder.take_reports() if resharder else []


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_log_prob_moments(self: Any) -> dict[str, dict[str, float]] | None:
    """Moments of both sides' log-probs in this worker's last update (old_log_prob.py); None where others have them."""
    return self.__dict__.pop("log_prob_moments", None)


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_checked(self: Any) -> dict[str, Any] | None:
    """What this replica sampled for the truth check (rollout/log_probs.py), from its first rank; None from others."""
    first = torch.distributed.get_rank() % self.config.rollout.tensor_model_parallel_size == 0
    checked = self.rollout.__dict__.pop("checked")
    return checked if first else None


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_offload(self: Any) -> list[dict[str, Any]]:
    """What was moved between host and device since the last call (memory/moves.py); empty on verl's own path."""
    return moves.take()


@register(dispatch_mode=Dispatch.ONE_TO_ALL)
def take_starts(self: Any) -> list[tuple[str, float]]:
    """When this process started what the trainer asked of all workers, since the last call (comm/starts.py)."""
    return starts.take()
