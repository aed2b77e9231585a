"""Configurations in which recipe.tensor_cache.enabled cannot hold, and where it packs micro batches. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ON = "recipe.tensor_cache.enabled is true, but"
_SECTION = "actor_rollout_ref"
_ROLLOUT, _ACTOR = f"{_SECTION}.rollout", f"{_SECTION}.actor"
_DYNAMIC = {  # stage -> its section, switch and budget, as verl 0.4.0 names them; 54c9b736 has no dynamic batches
    "update": ("actor", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    "log_prob": ("rollout", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    "ref": ("ref", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
}


def token_budget(section: Any, stage: str) -> int | None:
    """Most tokens of a micro batch where its size is dynamic, else None; `section` is actor_rollout_ref."""
    name, switch, budget = _DYNAMIC[stage]
    return section[name][budget] if section[name].get(switch) else None


def faults(config: Any) -> Iterator[str]:
    """Why a composed configuration cannot keep its tensors on the workers, one sentence each; none where it is off."""
    if not config.recipe.tensor_cache.enabled:
        return
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    if rollout.name != "vllm" or rollout.mode != "sync":
        yield f"{_ON} {_ROLLOUT} is {rollout.name}, {rollout.mode}; only vllm, sync leaves its responses on the workers"
    if rollout.multi_turn.enable:
        yield f"{_ON} {_ROLLOUT}.multi_turn.enable is true: its masks have holes; set false"
    if config.recipe.rollout.replay is not None:
        yield f"{_ON} recipe.rollout.replay gives responses to the trainer alone; set one of them only"
    if actor.shuffle:
        yield f"{_ON} {_ACTOR}.shuffle is true: micro batches would be others than planned; set false"
    if not actor.get("recompute_old_log_prob", True):
        yield f"{_ON} {_ACTOR}.recompute_old_log_prob is false: verl's actor has no log-probs then; set true"
    yield from _trainer_faults(config)
    yield from _budget_faults(config)


def _trainer_faults(config: Any) -> Iterator[str]:
    if config.algorithm.adv_estimator == "gae":
        yield (f"{_ON} algorithm.adv_estimator is gae: its critic takes the padded batch from the trainer; use an "
               "estimator without a critic, such as grpo")
    if config.reward_model.enable:
        yield (f"{_ON} reward_model.enable is true: its workers take the padded batch from the trainer; set false and "
               "give custom_reward_function")
    if config.data.return_raw_chat:
        yield f"{_ON} data.return_raw_chat is true: raw prompts would not come back with the responses; set false"


def _budget_faults(config: Any) -> Iterator[str]:
    longest = config.data.max_prompt_length + config.data.max_response_length
    for stage, (name, switch, key) in _DYNAMIC.items():
        budget = token_budget(config.actor_rollout_ref, stage)
        if budget is not None and budget < longest:
            yield (f"{_ON} {_SECTION}.{name}.{switch} is true with {key} {budget}: a sample may have {longest} tokens "
                   "(data.max_prompt_length + data.max_response_length); raise it to that or more")
