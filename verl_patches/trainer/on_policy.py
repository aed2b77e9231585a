"""What `recipe` says of on-policy training, and the configurations in which it cannot hold. Torch-free.

recipe.train.skip_old_log_prob   the update takes its own log-probs as old ones: one forward pass of the actor less
recipe.rollout_correction        weights and rejection for where vLLM's probabilities differ from the actor's
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.trainer.truth_check import why_not

LEVELS, REJECTIONS = ("token", "sequence"), ("seq_sum_k1", "seq_mean_k1")
_SKIP, _SECTION = "recipe.train.skip_old_log_prob", "recipe.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"
_RANDOM = ("attention_dropout", "hidden_dropout", "moe_input_jitter_eps")


@dataclass(frozen=True)
class Correction:
    """recipe.rollout_correction where something of it is on.

    level: whose ratio weighs a token, LEVELS or None; cap: the highest weight. reject: whose ratio a sequence is
    rejected by, REJECTIONS or None; bounds: lowest and highest pi_rollout / pi_actor that is kept.
    """

    level: str | None
    cap: float
    reject: str | None
    bounds: tuple[float, float] | None


def correction_of(section: Any) -> Correction | None:
    """The section as read; None where all of it is off. Raises ConfigError for bounds that are none."""
    if section.rollout_is is None and section.rollout_rs is None:
        return None
    bounds = None if section.rollout_rs is None else ratio_bounds(section.rollout_rs_threshold)
    return Correction(section.rollout_is, section.rollout_is_threshold, section.rollout_rs, bounds)


def ratio_bounds(text: str | None) -> tuple[float, float]:
    """(lowest, highest) of "0.5_2.0", or of "2.0", which is short for it; ConfigError for anything else."""
    try:
        numbers = [float(number) for number in str(text).split("_")]
        low, high = numbers if len(numbers) == 2 else (1 / numbers[0], *numbers)
        if 0 < low < high < float("inf"):
            return low, high
    except (ValueError, ZeroDivisionError):
        pass
    raise ConfigError(
        f"{_SECTION}.rollout_rs_threshold is {text!r}; expected LOWEST_HIGHEST pi_rollout / pi_actor, "
        "such as 0.5_2.0, or the highest alone, above 1"
    )


def faults(config: Any, hf_config: Mapping[str, Any]) -> list[str]:
    """Why a composed configuration cannot run as it says, one sentence each; empty where it can."""
    return [*_skip_faults(config, hf_config), *_correction_faults(config)]


def _skip_faults(config: Any, hf_config: Mapping[str, Any]) -> Iterator[str]:
    if not config.recipe.train.skip_old_log_prob:
        return
    actor, told = config.actor_rollout_ref.actor, f"{_SKIP} is true, but"
    mini, batch, epochs = actor.ppo_mini_batch_size, config.data.train_batch_size, actor.ppo_epochs
    if mini != batch:
        yield (
            f"{told} {_ACTOR}.ppo_mini_batch_size is {mini} and data.train_batch_size {batch}: only the first mini "
            "batch meets the weights that it was sampled with; make them equal"
        )
    if epochs != 1:
        yield f"{told} {_ACTOR}.ppo_epochs is {epochs}: from the second on the weights are others; set 1"
    if config.algorithm.use_kl_in_reward:
        yield f"{told} algorithm.use_kl_in_reward is true, which needs them before the update; use {_ACTOR}.use_kl_loss"
    if config.trainer.critic_warmup:
        yield (
            f"{told} trainer.critic_warmup is {config.trainer.critic_warmup}: a step without an update has no "
            "log-probs to check vLLM's by; set 0"
        )
    told_by = {
        "the model's config.json": hf_config,
        f"{_ACTOR}.megatron.override_transformer_config": actor.megatron.get("override_transformer_config"),
    }
    for where, found in told_by.items():
        for name in _RANDOM:
            if (found or {}).get(name):
                yield f"{told} {where} says {name} {found[name]}: two forward passes differ then; set 0"


def _correction_faults(config: Any) -> Iterator[str]:
    section = config.recipe.rollout_correction
    for name, allowed in (("rollout_is", LEVELS), ("rollout_rs", REJECTIONS)):
        if section[name] not in (None, *allowed):
            yield f"{_SECTION}.{name} is {section[name]!r}; expected null, {' or '.join(allowed)}"
    if not 0 < section.rollout_is_threshold < float("inf"):
        yield f"{_SECTION}.rollout_is_threshold is {section.rollout_is_threshold}; expected the highest weight, above 0"
    if section.rollout_rs is None and section.rollout_rs_threshold is not None:
        yield f"{_SECTION}.rollout_rs_threshold is {section.rollout_rs_threshold}, but rollout_rs is null; set both"
    try:
        on = correction_of(section) is not None
    except ConfigError as error:
        on = True
        yield str(error)
    recipe = config.recipe
    reason = on and why_not(
        config.actor_rollout_ref.rollout,
        replayed=recipe.rollout.replay is not None,
        balanced=recipe.rollout.balanced_routing or recipe.train.balanced_routing,
    )
    if reason:
        yield f"{_SECTION} is on, but vLLM's log-probs are not the actor's by another engine: {reason}"
