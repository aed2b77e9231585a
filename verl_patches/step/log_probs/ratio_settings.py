"""Parse and check the settings of `recipe` that change old log-probs or importance ratios of an update. No torch here.

recipe.train.skip_old_log_prob   the update takes its own log-probs as old ones, which saves a forward pass of the actor
recipe.train.importance_ratio    sequence: GSPO's ratios of sequences (arXiv:2507.18071), not of tokens
recipe.rollout_correction        importance weights and rejection where vLLM's probabilities differ from the actor's
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from verl_patches.errors import Check, ConfigError
from verl_patches.spec import RunSpec
from verl_patches.step.log_probs.logprob_check import incomparable_reason

_SKIP_KEY, _CORRECTION_KEY = "recipe.train.skip_old_log_prob", "recipe.rollout_correction"
MASKED_SHARE = "rollout_corr/rollout_rs_masked_fraction"  # verl's name of the share of tokens that rollout_rs rejects
_ACTOR = "actor_rollout_ref.actor"
_RANDOM_KEYS = "attention_dropout", "hidden_dropout", "moe_input_jitter_eps"


@dataclass(frozen=True)
class Correction:
    """Hold recipe.rollout_correction with weights, rejection or both on.

    level: token or sequence, whose ratio is a token's weight; cap: the highest weight. reject: token_k1, by which a
    token is rejected, or seq_sum_k1 or seq_mean_k1, by which a sequence is; bounds: lowest and highest
    pi_rollout / pi_actor of an accepted one.
    """

    level: str | None
    cap: float
    reject: str | None
    bounds: tuple[float, float] | None


def has_correction(section: Any) -> bool:
    """Return whether a part of recipe.rollout_correction is on."""
    return section.rollout_is is not None or section.rollout_rs is not None


def parse_correction(section: Any) -> Correction | None:
    """Return the parsed section; None if all of it is off. Raises ConfigError for invalid bounds."""
    if not has_correction(section):
        return None
    bounds = None if section.rollout_rs is None else ratio_bounds(section.rollout_rs_threshold)
    return Correction(section.rollout_is, section.rollout_is_threshold, section.rollout_rs, bounds)


def ratio_bounds(text: str | None) -> tuple[float, float]:
    """Return (0.5, 2.0) of "0.5_2.0" or of its short form "2.0"; ConfigError for others, like 12 (YAML's 1_2)."""
    try:
        numbers = [float(number) for number in str(text).split("_")]
        low, high = numbers if len(numbers) == 2 else (1 / numbers[0], *numbers)
        if 0 < low < high < float("inf") and (len(numbers) == 2 or "." in str(text)):
            return low, high
    except (ValueError, ZeroDivisionError):
        pass
    raise ConfigError(
        f"{_CORRECTION_KEY}.rollout_rs_threshold is {text!r}; expected LOWEST_HIGHEST pi_rollout / pi_actor, "
        "such as 0.5_2.0, or the highest alone, above 1, as 2.0; write each number with a decimal point: YAML reads "
        "0.5_2 as 0.52"
    )


def ratio_checks(run: RunSpec) -> Iterator[Check]:
    """Check that skip_old_log_prob, importance_ratio and rollout_correction are valid in this run."""
    faults = [*_skip_faults(run), *_sequence_faults(run), *_correction_faults(run)]
    yield from (Check("on policy", False, fault) for fault in faults)
    if run.recipe.train.skip_old_log_prob and not faults:
        yield Check("on policy", True, "no pass for old log-probs: one mini batch and one epoch an update")


def needs_old_log_probs(run: RunSpec) -> bool:
    """Return whether old log-probs must precede the update: it has several optimizer steps, or the reward has KL."""
    actor = run.verl.actor_rollout_ref.actor
    several = actor.ppo_mini_batch_size != run.verl.data.train_batch_size or actor.ppo_epochs != 1
    return bool(several or run.verl.algorithm.use_kl_in_reward)


def _skip_faults(run: RunSpec) -> Iterator[str]:
    if not run.recipe.train.skip_old_log_prob:
        return
    actor, fact = run.verl.actor_rollout_ref.actor, f"{_SKIP_KEY} is true, but"
    mini, batch, epochs = actor.ppo_mini_batch_size, run.verl.data.train_batch_size, actor.ppo_epochs
    if mini != batch:
        yield (
            f"{fact} {_ACTOR}.ppo_mini_batch_size is {mini} and data.train_batch_size {batch}: only the "
            "first mini batch is trained with the weights that sampled it; make them equal"
        )
    if epochs != 1:
        yield f"{fact} {_ACTOR}.ppo_epochs is {epochs}: from the second epoch on the weights have changed; set 1"
    if run.verl.algorithm.use_kl_in_reward:
        yield f"{fact} algorithm.use_kl_in_reward needs old log-probs before the update; use {_ACTOR}.use_kl_loss"
    if run.verl.trainer.critic_warmup:
        yield (
            f"{fact} trainer.critic_warmup is {run.verl.trainer.critic_warmup}: a step without an "
            "update has no log-probs for the log-prob check; set 0"
        )
    sources = {
        "the model's config.json": run.hf_config,
        f"{_ACTOR}.megatron.override_transformer_config": actor.megatron.get("override_transformer_config"),
    }
    for where, values in sources.items():
        for name in _RANDOM_KEYS:
            if (values or {}).get(name):
                yield f"{fact} {where} sets {name} to {values[name]}, so two forward passes differ; set 0"


def _sequence_faults(run: RunSpec) -> Iterator[str]:
    actor = run.verl.actor_rollout_ref.actor
    if run.recipe.train.importance_ratio != "sequence":
        return
    fact = "recipe.train.importance_ratio is sequence, but"
    if actor.loss_agg_mode != "seq-mean-token-mean":
        yield f"{fact} {_ACTOR}.loss_agg_mode is {actor.loss_agg_mode}; GSPO needs seq-mean-token-mean: set that"
    if actor.ppo_mini_batch_size == run.verl.data.train_batch_size and actor.ppo_epochs == 1:
        yield (
            f"{fact} a step is one mini batch and one epoch, so all ratios are 1: set {_ACTOR}.ppo_mini_batch_size to "
            "a part of data.train_batch_size"
        )
    for row in ("update.on_policy", "update.loss_on_policy"):
        if row not in run.rows:
            yield f"{fact} row {row} is off; remove -{row} from recipe.patches"


def _correction_faults(run: RunSpec) -> Iterator[str]:
    section = run.recipe.rollout_correction
    if section.rollout_rs is None and section.rollout_rs_threshold is not None:
        threshold = section.rollout_rs_threshold
        yield f"{_CORRECTION_KEY}.rollout_rs_threshold is {threshold}, but rollout_rs is null; set both"
    try:
        on = parse_correction(section) is not None
    except ConfigError as error:
        on = True
        yield str(error)
    if not on:
        return
    if reason := incomparable_reason(run):
        yield (
            f"{_CORRECTION_KEY} is on, but vLLM's and the actor's log-probs cannot be compared: {reason}; set "
            "rollout_is and rollout_rs to null"
        )
