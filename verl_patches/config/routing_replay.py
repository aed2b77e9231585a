"""Rules of recipe.train.routing_replay (worker/routing_replay.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_patches.config.compose import switched_off

KEY = "recipe.train.routing_replay"
MODES = {
    "R2": "the update selects the experts of the pass for old log-probs",
    "R3": "the actor's passes select the experts of the rollout",
}


def checks(config: Any, model: Any) -> Iterator[tuple[str, bool, str]]:
    """(name, whether it holds, detail) of each rule; none where the key is null."""
    train = config.recipe.train
    mode, control = train.routing_replay, train.routing_replay_control_every
    if control is not None and (mode != "R3" or train.skip_old_log_prob):
        yield "routing replay", False, f"{KEY}_control_every is {control}: it acts on R3's pass for old log-probs only"
    if mode is None:
        return
    faults = list(_faults(config, mode))
    if mode == "R3":
        faults += _rollout_faults(config, model)
    yield "routing replay", not faults, f"{KEY} is {mode}, but {'; '.join(faults)}" if faults else MODES[mode]


def _faults(config: Any, mode: str) -> Iterator[str]:
    recipe = config.recipe
    if mode not in MODES:
        yield f"expected null, {' or '.join(MODES)}"
    if mode == "R2" and recipe.train.skip_old_log_prob:
        yield "recipe.train.skip_old_log_prob leaves out the pass that records; set it false"
    if not recipe.train.use_remove_padding:
        yield "recipe.train.use_remove_padding is false: tokens are counted in packed sequences; set it true"
    if recipe.train.balanced_routing:
        yield "recipe.train.balanced_routing ignores the router; set one of them"
    selection = "update.routing_replay" if recipe.line == "pypi" else "update.routing_replay_mindspeed"
    for row in ("update.recipe_worker", "update.routing_samples", selection):
        if switched_off(config, row):
            yield f"row {row} is off; remove -{row} from recipe.patches"


def _rollout_faults(config: Any, model: Any) -> Iterator[str]:
    """Of R3: what prevents the rollout from recording the experts of all tokens."""
    recipe = config.recipe
    if (recipe.line, recipe.platform) != ("pypi", "cpu"):
        yield (
            f"experts are recorded on line pypi, platform cpu only, found {recipe.line}, {recipe.platform}: there is "
            "no recorder for vLLM's engine V1; use R2"
        )
    if recipe.rollout.replay is not None:
        yield "recipe.rollout.replay has no experts for its responses; set one of them"
    if recipe.logprob_check.every is not None:
        yield "recipe.logprob_check.every samples sequences whose experts are not recorded; set it null"
    if switched_off(config, "rollout.keep_log_probs"):
        yield "row rollout.keep_log_probs is off; remove -rollout.keep_log_probs from recipe.patches"
    if model.n_routed_experts > 256:
        yield f"the model has {model.n_routed_experts} experts; the rollout records up to 256 (uint8)"
