"""recipe.tensor_cache.enabled: configurations that it does not support, bytes through the trainer; token budgets of
micro batches. No torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from verl_patches.spec import RunSpec

_ON = "recipe.tensor_cache.enabled is true, but"
_SECTION = "actor_rollout_ref"
_ROLLOUT, _ACTOR = f"{_SECTION}.rollout", f"{_SECTION}.actor"
_DYNAMIC = {  # stage -> its section, switch and budget, as verl 0.4.0 names them; 54c9b736 takes ours for them
    "update": ("actor", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    "log_prob": ("rollout", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    "ref": ("ref", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
}


def token_budget(section: Any, stage: str) -> int | None:
    """Most tokens of a micro batch if its size is dynamic, else None; `section` is actor_rollout_ref.

    The key counts tokens of one rank: context-parallel ranks share a micro batch, as in verl 0.4.0.
    """
    name, switch, budget = _DYNAMIC[stage]
    return section[name][budget] * section.actor.megatron.context_parallel_size if section[name].get(switch) else None


def has_dynamic_batches(section: Any) -> bool:
    """Return whether micro batches of any stage have a budget of tokens; `section` is actor_rollout_ref."""
    return any(token_budget(section, stage) is not None for stage in _DYNAMIC)


ID_BYTES = 3  # of a response's token id on its way to the trainer: a vocabulary of 16.7 million


def trainer_bytes(
    prompts: int, samples: int, prompt_tokens: float, response_tokens: float, *, send_back: bool, per_token: bool
) -> dict[str, dict[str, int]]:
    """{stage: {"column dtype": bytes}} of what the trainer sends in a step, once to all workers, or gets back.

    `prompt_tokens`: of the prompts, each once; `response_tokens`: of all samples. `send_back`: KL in the reward.
    `per_token`: advantages differ within a sample. Left out: meta_info, numbers of which there is one a rank, and what
    Ray and pickle add.
    """
    values = {"values float32": 4 * round(response_tokens)} if send_back else {}
    return {
        "generate": {
            "prompt_ids int32": 4 * round(prompt_tokens),
            "prompt_lengths int32": 4 * prompts,
            f"response_ids {ID_BYTES} x uint8": ID_BYTES * round(response_tokens),
            "response_length int32": 4 * samples,
        },
        "place": {"prompts int32": 4 * samples, "responses int32": 4 * samples},
        "log_prob": {"samples int32": 4 * samples, "entropy float32": 4 * samples, **values},
        "ref": {"samples int32": 4 * samples, **values} if send_back else {},
        "update": {"advantages float32": 4 * (round(response_tokens) if per_token else samples)},
    }


def cache_faults(run: RunSpec) -> Iterator[str]:
    """Return why a run cannot use the tensor cache, one sentence each; none if the cache is off."""
    if not run.recipe.tensor_cache.enabled:
        return
    rollout, actor = run.verl.actor_rollout_ref.rollout, run.verl.actor_rollout_ref.actor
    for side in ("prompt", "response"):
        width, of_data = rollout[f"{side}_length"], run.verl.data[f"max_{side}_length"]
        if width != of_data:
            yield (
                f"{_ON} {_ROLLOUT}.{side}_length is {width} and data.max_{side}_length {of_data}: a batch rebuilt "
                "from lengths would not be as wide as vLLM's; make them equal"
            )
    if run.recipe.rollout.replay is not None:
        yield f"{_ON} recipe.rollout.replay gives responses to the trainer alone; set one of them only"
    if actor.shuffle:
        yield f"{_ON} {_ACTOR}.shuffle is true: micro batches would be others than planned; set false"
    if run.verl.data.return_raw_chat:
        yield f"{_ON} data.return_raw_chat is true: raw prompts would not come back with the responses; set false"
    if run.verl.data.custom_cls.path is not None:
        path = run.verl.data.custom_cls.path
        yield f"{_ON} data.custom_cls.path is {path}: prompts are rebuilt as verl's own RLHFDataset has them; set null"


def budget_faults(run: RunSpec) -> Iterator[str]:
    """Why a budget of dynamic micro batches does not do, one sentence each, with the tensor cache or without."""
    longest = run.longest_tokens
    for stage, (name, switch, key) in _DYNAMIC.items():
        budget = token_budget(run.verl.actor_rollout_ref, stage)
        if budget is not None and budget < longest:
            yield (
                f"{_SECTION}.{name}.{switch} is true with {key} {budget}: a sample may have {longest} tokens "
                "(data.max_prompt_length + data.max_response_length); raise it to that or more"
            )
