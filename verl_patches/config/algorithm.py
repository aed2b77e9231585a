"""The rules of an algorithm: its estimator, objective, critic, rewards and sampling, and what does not go together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl_patches.config.compose import switched_off, unlike_actor
from verl_patches.errors import Check, divides, either
from verl_patches.layout.inventory import read_model_shape
from verl_patches.layout.parallel import ParallelLayout, critic_of
from verl_patches.layout.phases import reward_models, samples
from verl_patches.objectives import settings
from verl_patches.rewards.parts import METRIC, parts_of

_ROLLOUT = "actor_rollout_ref.rollout"
_OF_GROUPS = ("grpo", "grpo_passk", "reinforce_plus_plus_baseline", "rloo")  # advantage estimators


def estimator_checks(config: DictConfig) -> Iterator[Check]:
    """Whether a prompt has as many responses as the advantage estimator and the validation need."""
    if not samples(config.recipe):
        return
    estimator, rollout = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout
    held = f"{estimator}, {rollout.n} response(s) a prompt"
    if estimator == "remax":
        held += ", and a greedy one, whose rollout and weight sync the modelled step leaves out"
    fault = (
        f"algorithm.adv_estimator is {estimator}, which compares the responses of one prompt, and {_ROLLOUT}.n is 1; "
        "expected 2 or more, or algo=reinforce_plus_plus or remax, which need no group"
    )
    yield either("advantages", estimator not in _OF_GROUPS or rollout.n > 1, held, fault)
    val, trainer = rollout.val_kwargs, config.trainer
    if validates(config):
        held = f"{val.n} response(s) a prompt of data.val_files"
        held += f", every {trainer.test_freq} steps" if trainer.test_freq > 0 else ", before the first step only"
        fault = f"{_ROLLOUT}.val_kwargs.n is {val.n}, but greedy responses are equal; set do_sample=true, or n=1"
        yield either("validation", val.n == 1 or val.do_sample, held, fault)
        if val.do_sample and not val.temperature:
            fault = f"{_ROLLOUT}.val_kwargs.do_sample is true and temperature 0, which verl refuses; set temperature"
            yield Check("validation", False, fault)


def validates(config: DictConfig) -> bool:
    return config.trainer.test_freq > 0 or config.trainer.val_before_train


def objective_checks(config: DictConfig) -> list[Check]:
    """Whether the update has the gradient of recipe.objective; none where responses are sampled."""
    if samples(config.recipe):
        return []
    name = config.recipe.objective.name
    faults = [
        f"recipe.objective.name is {name}, but row {row} is off; remove -{row} from recipe.patches"
        for row in ("advantage.objective", "update.fit_as_run", "update.recipe_worker", "update.on_policy")
        if switched_off(config, row)
    ]
    if faults := [*settings.faults(config), *faults]:
        return [Check("objective", False, fault) for fault in faults]
    return [Check("objective", True, f"{name}; no rollout: fixed data")]


def critic_checks(config: DictConfig) -> Iterator[Check]:
    """What a critic's passes do not have, and its model; none without a critic."""
    critic, actor = critic_of(config), config.actor_rollout_ref
    if critic is None:
        return
    faults: list[str] = []
    if critic.use_dynamic_bsz:
        faults.append(
            "critic.use_dynamic_bsz is true: verl 54c9b736's critic does not read it, and micro batches of 0.4.0's are "
            "not planned within the budget; set it false"
        )
    if critic.rollout_n != actor.rollout.n:
        faults.append(f"critic.rollout_n is {critic.rollout_n}; expected {_ROLLOUT}.n, {actor.rollout.n}")
    if critic.ppo_micro_batch_size is not None:
        faults.append("critic.ppo_micro_batch_size is given; set critic.ppo_micro_batch_size_per_gpu alone")
    if critic.shuffle and critic.data_loader_seed is None:
        faults.append("critic.shuffle is true, which needs critic.data_loader_seed=N")
    if critic.megatron.use_dist_checkpointing or not critic.load_weight:
        faults.append("critic.load_weight must be true and critic.megatron.use_dist_checkpointing false")
    file = Path(critic.model.path) / "config.json"
    if file.is_file() and critic.model.path != actor.model.path:
        if unlike := unlike_actor(config, read_model_shape(file), file):
            faults.append(f"critic.model.path is of another model than the actor: {unlike}")
    if switched_off(config, "update.recipe_critic") or switched_off(config, "update.recipe_worker"):
        faults.append("row update.recipe_critic or update.recipe_worker is off: verl's own critic would train")
    yield either("critic", not faults, f"values by a head on {critic.model.path}", "; ".join(faults))


def reward_checks(config: DictConfig) -> list[Check]:
    """recipe.rewards: parts that the run can have, and some, unless the objective needs none."""
    parts, recipe, longest = parts_of(config), config.recipe, config.data.max_response_length
    faults = []
    if switched_off(config, "reward.parts") and recipe.rewards is not None:
        faults.append("row reward.parts is off, and verl's reward manager has no parts; remove -reward.parts")
    if not parts and samples(recipe):
        faults.append("recipe.rewards is empty, so every reward would be 0; expected a part, or null")
    for where in (p.where for p in parts if p.entry.name == "length" and p.entry.buffer_of(longest) > longest):
        faults.append(f"{where}.buffer_tokens is above data.max_response_length, {longest}; expected at most that")
    models = reward_models(recipe)
    if config.reward_model.enable and not models:
        faults.append(
            "reward_model.enable is true, which entries of recipe.rewards stand for: leave it false, and give "
            "recipe.rewards=[{name: reward_model, path: FOLDER}, ...]"
        )
    if models and len(models) == len(parts) and validates(config):
        faults.append(
            "reward models do not run in validation, and recipe.rewards has nothing else, so each score would be 0; "
            "add a part, or set trainer.test_freq=-1 and trainer.val_before_train=false"
        )
    if models and config.algorithm.adv_estimator == "remax":
        faults.append("verl runs no reward model for remax's baseline; leave the part reward_model out")
    held = " + ".join(f"{part.entry.weight:g} x {part.label}" for part in parts) or "no part"
    return [Check("rewards", False, fault) for fault in faults] or [Check("rewards", True, held)]


def reward_model_checks(config: DictConfig, train: ParallelLayout) -> Iterator[Check]:
    """What the passes of reward models need of verl's section; none without one."""
    models, section, rollout = reward_models(config.recipe), config.reward_model, config.actor_rollout_ref.rollout
    if not models:
        return
    expected = {"use_dynamic_bsz": False, "load_weight": True, "megatron.use_dist_checkpointing": False}
    expected |= {"megatron.param_offload": True, "model.rm_tokenizer": None, "micro_batch_size": None}
    found = {key: OmegaConf.select(section, key) for key in expected}
    faults = [
        f"reward_model.{key} is {found[key]}; expected {value}"
        for key, value in expected.items()
        if found[key] != value
    ]
    if (micro := section.micro_batch_size_per_gpu) is None:
        faults.append("reward_model.micro_batch_size_per_gpu is null; set responses of a micro batch")
    if switched_off(config, "reward.models") or switched_off(config, "update.recipe_worker"):
        faults.append("row reward.models or update.recipe_worker is off: verl's own worker has one model")
    yield either("reward models", not faults, f"{len(models)}, one after another on a die", "; ".join(faults))
    if not faults:
        key = "reward_model.micro_batch_size_per_gpu (responses a rank and step)"
        responses = config.data.train_batch_size * rollout.n // train.dp
        yield divides("reward model micro batch", responses, micro, key, "micro batches of a step's scores")


def keep_groups_checks(config: DictConfig) -> Iterator[Check]:
    """recipe.keep_groups: what else samples, or cannot while the rollout engine is awake; nothing where it is off."""
    section, recipe, rollout = config.recipe.keep_groups, config.recipe, config.actor_rollout_ref.rollout
    if section.metric is None:
        return
    faults = [
        (rollout.n < 2, f"{_ROLLOUT}.n is {rollout.n}: the responses of a prompt must differ; set 2 or more"),
        (recipe.tensor_cache.enabled, "recipe.tensor_cache.enabled is true: it holds all responses; set it false"),
        (recipe.rollout.replay is not None, "recipe.rollout.replay gives the responses; set one of them"),
        (
            config.algorithm.adv_estimator == "remax",
            "algorithm.adv_estimator is remax, with responses of the first batch",
        ),
        (reward_models(recipe) != [], "recipe.rewards has a reward model: no memory while the rollout engine is awake"),
    ]
    wrong = [text for is_wrong, text in faults if is_wrong]
    labels = [f"{METRIC}{part.label}" for part in parts_of(config)]
    if section.metric.startswith(METRIC) and section.metric not in labels:
        wrong.append(f"recipe.rewards gives {', '.join(labels)}; set one of them, score, or a function's own key")
    held = f"prompts whose responses differ in {section.metric}, from at most {section.max_batches} batches a step"
    yield either(
        "keep groups", not wrong, held, f"recipe.keep_groups.metric is {section.metric}, but {'; '.join(wrong)}"
    )
