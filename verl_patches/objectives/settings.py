"""What objectives on fixed data need of the configuration and of the data's columns. No torch here.

verl's update has the gradient of a loss L if advantages are -B dL/dlogp (objectives/advantages.py), each of the B
responses weighs 1/B, and nothing else is in its loss: `faults` names what contradicts that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_patches.layout.phases import OF_VALUES, samples

_PAIR = {"prompt": "messages", "chosen": "text", "rejected": "text"}
# objective -> columns of a data file and their kinds, or other columns in their place
COLUMNS: dict[str, tuple[dict[str, str], ...]] = {
    "sft": ({"prompt": "messages", "response": "text"}, {"text": "text"}),
    "dpo": (_PAIR,),
    "ipo": (_PAIR,),
    "rm": (_PAIR,),
    "kto": ({"prompt": "messages", "response": "text", "label": "bool"},),
    "prm": ({"prompt": "messages", "steps": "texts", "labels": "marks"},),
}
KINDS = {
    "messages": "a list of messages with role and content",
    "text": "text",
    "bool": "true or false",
    "texts": "a list of texts",
    "marks": "a list of true or false, or of numbers from 0 to 1",
}
RESPONSES = {"sft": 1, "prm": 1, "dpo": 2, "ipo": 2, "kto": 2, "rm": 2}  # of each prompt in a batch
WITH_REFERENCE = ("dpo", "ipo", "kto")
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def columns_of(objective: str, names: list[str]) -> dict[str, str]:
    """{column: kind} that a file with these columns is read by; the first way where it has none of them whole."""
    ways = COLUMNS[objective]
    return next((way for way in ways if way.keys() <= set(names)), ways[0])


def faults(config: Any) -> Iterator[str]:
    """Why a composed configuration does not train recipe.objective exactly, one sentence each; none for rl."""
    recipe, objective = config.recipe, config.recipe.objective
    if samples(recipe):
        return
    given = f"recipe.objective.name is {objective.name}, but"
    if objective.label_smoothing and objective.name != "dpo":
        yield f"{given} recipe.objective.label_smoothing is {objective.label_smoothing}: only dpo has it; set 0"
    if config.data.custom_cls.path is None:
        yield f"{given} data.custom_cls.path is null: verl's own dataset gives no responses; use algo={objective.name}"
    if objective.name == "kto" and config.data.train_batch_size < 2:
        yield f"{given} data.train_batch_size is 1: the KL pairs a prompt with another row's response; set 2 or more"
    for key, found, expected, why in _rules(config, objective.name):
        if found not in expected:
            shown = " or ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in expected)
            yield f"{given} {key} is {found}: {why}; set {shown}"


def _rules(config: Any, name: str) -> Iterator[tuple[str, Any, tuple[Any, ...], str]]:
    """(key, value found, values expected, reason)."""
    recipe, actor, rollout = config.recipe, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    batch, reference = config.data.train_batch_size, name in WITH_REFERENCE
    yield f"{_ROLLOUT}.n", rollout.n, (RESPONSES[name],), "a prompt has that many responses in a batch"
    why = "only then each response weighs equally, whatever its length and micro batch"
    yield f"{_ACTOR}.loss_agg_mode", actor.loss_agg_mode, ("seq-mean-token-sum",), why
    why = "the gradient is that of the whole batch, at weights that have not changed"
    yield f"{_ACTOR}.ppo_mini_batch_size", actor.ppo_mini_batch_size, (batch,), why
    yield f"{_ACTOR}.ppo_epochs", actor.ppo_epochs, (1,), why
    why = "the loss has no other term"
    yield f"{_ACTOR}.entropy_coeff", actor.entropy_coeff, (0,), why
    yield "algorithm.use_kl_in_reward", config.algorithm.use_kl_in_reward, (False,), why
    if reference:
        yield f"{_ACTOR}.use_kl_loss", actor.use_kl_loss, (True,), "the loss needs the reference's log-probs"
        yield f"{_ACTOR}.kl_loss_coef", actor.kl_loss_coef, (0,), why
        yield f"{_ACTOR}.kl_loss_type", actor.kl_loss_type, ("kl",), "others overflow, and 0 x inf is NaN"
        why = "the loss needs the policy's log-probs before the update"
        yield "recipe.train.skip_old_log_prob", recipe.train.skip_old_log_prob, (False,), why
    else:
        yield f"{_ACTOR}.use_kl_loss", actor.use_kl_loss, (False,), "the loss has no reference"
    if name in OF_VALUES:
        yield "algorithm.adv_estimator", config.algorithm.adv_estimator, ("gae",), "the value model is what is trained"
        why = "the critic's update is the one that trains"
        for key in ("loss_agg_mode", "ppo_mini_batch_size", "ppo_epochs"):
            yield f"critic.{key}", config.critic[key], (actor[key],), why
    else:
        yield "algorithm.adv_estimator", config.algorithm.adv_estimator, ("grpo",), "others would need a critic"
        yield "trainer.critic_warmup", config.trainer.critic_warmup, (0,), "each step has an update"
    yield "data.prompt_key", config.data.prompt_key, ("prompt",), "columns of fixed data have these names"
    why = "no response is sampled"
    correction, check = recipe.rollout_correction, recipe.logprob_check
    yield "recipe.tensor_cache.enabled", recipe.tensor_cache.enabled, (False,), "the cache begins with a rollout"
    yield "recipe.train.routing_replay", recipe.train.routing_replay, (None,), "a batch is no rollout's"
    yield "recipe.rollout_correction.rollout_is", correction.rollout_is, (None,), why
    yield "recipe.rollout_correction.rollout_rs", correction.rollout_rs, (None,), why
    yield "recipe.logprob_check.action", check.action, ("off",), why
    yield "recipe.rollout.replay", recipe.rollout.replay, (None,), why
    yield "recipe.keep_groups.metric", recipe.keep_groups.metric, (None,), why
    yield "trainer.val_before_train", config.trainer.val_before_train, (False,), "validation would sample"
    yield "trainer.test_freq", max(config.trainer.test_freq, 0), (0,), "validation would sample"
    why = "fixed responses have no reward"
    yield "recipe.rewards", recipe.rewards, ([],), why
