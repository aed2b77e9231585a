"""Check the reward's settings: its parts, and the passes of reward models."""

from __future__ import annotations

from collections.abc import Iterator

from omegaconf import OmegaConf

from verl_patches.errors import Check, divides, either
from verl_patches.spec import RunSpec


def reward_checks(run: RunSpec) -> Iterator[Check]:
    """Check that the run can compute all parts of recipe.rewards, and has one, unless it trains on fixed data."""
    parts, recipe, longest = run.rewards, run.recipe, run.verl.data.max_response_length
    faults = []
    if "reward.parts" not in run.rows and recipe.rewards is not None:
        faults.append("row reward.parts is off: recipe.rewards has no effect; remove -reward.parts from recipe.patches")
    if not parts and run.samples:
        faults.append("recipe.rewards is empty, so every reward would be 0; expected at least one entry, or null")
    for part in parts:
        if part.entry.name == "length" and (buffer := part.entry.penalty_tokens(longest)) > longest:
            faults.append(f"{part.where}.buffer_tokens is {buffer}; expected <= data.max_response_length, {longest}")
    models = run.reward_models
    if run.verl.reward_model.enable and not models:
        faults.append(
            "reward_model.enable is true, but reward models are entries of recipe.rewards; set it to false, and "
            "recipe.rewards=[{name: reward_model, path: FOLDER}, ...]"
        )
    if models and len(models) == len(parts) and run.validates:
        faults.append(
            "reward models do not run in validation, and recipe.rewards has no other part, so each score would be 0; "
            "add a part, or set trainer.test_freq=-1 and trainer.val_before_train=false"
        )
    if models and run.verl.algorithm.adv_estimator == "remax":
        faults.append("adv_estimator is remax, whose baseline runs no reward model; remove the entries reward_model")
    summary = " + ".join(f"{part.entry.weight:g} x {part.label}" for part in parts) or "no part"
    yield from (Check("rewards", False, fault) for fault in faults)
    if not faults:
        yield Check("rewards", True, summary)


def reward_model_checks(run: RunSpec) -> Iterator[Check]:
    """Check that verl's section reward_model fits the passes of reward models; skip without one."""
    models, section, rollout = run.reward_models, run.verl.reward_model, run.verl.actor_rollout_ref.rollout
    if not models:
        return
    expected: dict[str, bool | None] = {"use_dynamic_bsz": False, "load_weight": True, "micro_batch_size": None}
    expected |= {"megatron.use_dist_checkpointing": False, "megatron.param_offload": True, "model.rm_tokenizer": None}
    found = {key: OmegaConf.select(section, key) for key in expected}
    faults = [
        f"reward_model.{key} is {found[key]}; expected {value}"
        for key, value in expected.items()
        if found[key] != value
    ]
    if (micro := section.micro_batch_size_per_gpu) is None:
        faults.append("reward_model.micro_batch_size_per_gpu is null; set the number of responses of a micro batch")
    if not {"reward.models", "update.recipe_worker"} <= run.rows:
        faults.append(
            "row reward.models or update.recipe_worker is off, and verl's own worker holds one reward model only; "
            "remove it from recipe.patches"
        )
    yield either("reward models", not faults, f"{len(models)}, one at a time on each device", "; ".join(faults))
    if not faults:
        key = "reward_model.micro_batch_size_per_gpu (responses a rank and step)"
        responses = run.verl.data.train_batch_size * rollout.n // run.train.dp
        yield divides("reward model micro batch", responses, micro, key, "micro batches of a step's scores")
