"""Compute token budgets of micro batches, and bytes that recipe.tensor_cache sends through the trainer. No torch."""

from __future__ import annotations

from typing import Any

DYNAMIC_BATCH_KEYS = {  # stage -> its section, switch and budget keys of verl 0.4.0; at 54c9b736 our patches read them
    "update": ("actor", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    "log_prob": ("rollout", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    "ref": ("ref", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
}


def token_budget(section: Any, stage: str) -> int | None:
    """Return the most tokens of a micro batch if its size is dynamic, else None; `section` is actor_rollout_ref.

    The key counts tokens of one rank: context-parallel ranks share a micro batch, as in verl 0.4.0.
    """
    name, switch, budget = DYNAMIC_BATCH_KEYS[stage]
    return section[name][budget] * section.actor.megatron.context_parallel_size if section[name].get(switch) else None


def has_dynamic_batches(section: Any) -> bool:
    """Return whether micro batches of any stage have a budget of tokens; `section` is actor_rollout_ref."""
    return any(token_budget(section, stage) is not None for stage in DYNAMIC_BATCH_KEYS)


ID_BYTES = 3  # bytes of a response's token id sent to the trainer: enough for a vocabulary of 16.7 million


def trainer_bytes(
    prompts: int, samples: int, prompt_tokens: float, response_tokens: float, *, send_back: bool, per_token: bool
) -> dict[str, dict[str, int]]:
    """Return {stage: {"column dtype": bytes}} of what the trainer receives, or sends, counted once for all workers.

    Arguments are of one step. `prompt_tokens`: each prompt once; `response_tokens`: of all samples. `send_back`: KL in
    the reward. `per_token`: advantages differ within a sample. Not counted: meta_info, one number by rank, the 8 bytes
    of each prompt's seed with rollout.seed, and the overhead of Ray and pickle.
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
