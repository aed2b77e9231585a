"""Check settings of routing replay, and of recorded responses that a run trains on."""

from __future__ import annotations

from collections.abc import Iterator

from verl_patches.errors import Check, ConfigError, either
from verl_patches.spec import RunSpec
from verl_patches.step.replay.recording import find_recording


def routing_replay_checks(run: RunSpec) -> Iterator[Check]:
    """Check that recipe.train.routing_replay has a pass that records, and routers that select; skip if it is off."""
    key, recipe = "recipe.train.routing_replay", run.recipe
    if recipe.train.routing_replay is None:
        return
    faults = []
    if recipe.train.skip_old_log_prob:
        faults.append("recipe.train.skip_old_log_prob leaves out the pass that records; set it false")
    if recipe.train.balanced_routing:
        faults.append("recipe.train.balanced_routing ignores the router; set one of them")
    selection = "update.routing_replay" if recipe.line == "pypi" else "update.routing_replay_mindspeed"
    for row in ("update.recipe_worker", "update.routing_samples", selection):
        if row not in run.rows:
            faults.append(f"row {row} is off; remove -{row} from recipe.patches")
    detail = "the update selects the experts of the pass for old log-probs"
    yield either("routing replay", not faults, detail, f"{key} is R2, but {'; '.join(faults)}")


def recording_checks(run: RunSpec) -> Iterator[Check]:
    """Check that a recording has the run's steps."""
    replay = run.recipe.rollout.replay
    if replay is None:
        return
    fault = ""
    try:
        find_recording(replay, run.verl.trainer.total_training_steps)
    except ConfigError as error:
        fault = str(error)
    yield either("replay", not fault, f"the responses of {replay}", fault)
