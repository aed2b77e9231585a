"""Rules of recipe.train.routing_replay (worker/routing_replay.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_patches.config.compose import switched_off

MODES = ("R2",)
KEY = "recipe.train.routing_replay"


def checks(config: Any, model: Any) -> Iterator[tuple[str, bool, str]]:
    """(name, whether it holds, detail) of each rule; none where the key is null."""
    mode = config.recipe.train.routing_replay
    if mode is None:
        return
    faults = list(_faults(config, mode))
    for fault in faults:
        yield "routing replay", False, f"{KEY} is {mode}, but {fault}"
    if not faults:
        yield "routing replay", True, "the update selects the experts of the pass for old log-probs"


def _faults(config: Any, mode: str) -> Iterator[str]:
    recipe = config.recipe
    if mode not in MODES:
        yield f"expected null or {' or '.join(MODES)}; the experts of the rollout (R3) are not recorded yet"
    if recipe.train.skip_old_log_prob:
        yield "recipe.train.skip_old_log_prob leaves out the pass that records; set it false"
    if recipe.train.balanced_routing:
        yield "recipe.train.balanced_routing ignores the router; set one of them"
    if config.trainer.critic_warmup:
        yield f"trainer.critic_warmup is {config.trainer.critic_warmup}: its steps have no update; set 0"
    selection = "update.routing_replay" if recipe.line == "pypi" else "update.routing_replay_mindspeed"
    for row in ("update.recipe_worker", "update.routing_samples", selection):
        if switched_off(config, row):
            yield f"row {row} is off; remove -{row} from recipe.patches"
