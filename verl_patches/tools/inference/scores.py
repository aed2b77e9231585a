"""Measure responses for `eval`: the training reward, mean@n, pass@k and intervals of each checkpoint.

The reward is that of training: verl's load_reward_manager with row reward.parts. As in verl's validation, the value of
a response is `acc` where the reward has it, else the reward.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from verl_patches.errors import ConfigError
from verl_patches.spec import RunSpec, write_run
from verl_patches.trainer.validation import pass_at_k

CONFIDENCE, BOOTSTRAP_DRAWS = 0.95, 1000


def unused_models(run: RunSpec) -> list[str]:
    """Return the labels of the reward's models, which no validation runs; ConfigError where no other part is left."""
    models = [part.label for part in run.rewards if part.entry.name == "reward_model"]
    if len(models) == len(run.rewards):
        found = "reward models alone, which eval does not run" if models else "none: this run has no reward"
        raise ConfigError(
            f"recipe.rewards: expected a part that eval can run, found {found}; "
            "give 'recipe.rewards=[{name: maths}]' and data.val_files with gold answers"
        )
    return models


def scorer(
    run: RunSpec, tokenizer: Any, row: Mapping[str, Any]
) -> Callable[[Mapping[str, Any], Sequence[Sequence[int]]], list[dict[str, Any]]]:
    """Return score(row, tokens of its responses), which returns {value, reward, results of parts} of each response.

    `row` is scored here with a response of one token, so that a reward that fails does so before an engine starts.
    """
    import numpy as np
    import torch
    from verl import DataProto
    from verl.trainer.ppo.reward import load_reward_manager
    from verl.utils.torch_functional import get_response_mask

    verl = run.verl.copy()
    OmegaConf.set_readonly(verl, False)
    write_run(verl, run.text())
    manager, longest = load_reward_manager(verl, tokenizer, num_examine=1), run.verl.data.max_response_length

    def score(row: Mapping[str, Any], responses: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
        ids = torch.full((len(responses), longest), tokenizer.pad_token_id or 0)
        for padded, tokens in zip(ids, responses, strict=True):
            padded[: len(tokens)] = torch.tensor(tokens)
        mask = get_response_mask(ids, tokenizer.eos_token_id)
        for kept, tokens in zip(mask, responses, strict=True):
            kept[len(tokens) :] = 0  # vLLM may have stopped at another end token of generation_config.json
        tensors = {"responses": ids, "attention_mask": mask}
        row_columns = {name: np.array([value] * len(ids), dtype=object) for name, value in row.items()}
        found = manager(DataProto.from_dict(tensors, row_columns), return_dict=True)
        columns = {"reward": found["reward_tensor"].sum(-1).tolist(), **found["reward_extra_info"]}
        scores = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [{"value": float(each["acc"] if "acc" in each else each["reward"]), **each} for each in scores]

    score(row, [[tokenizer.eos_token_id]])
    return score


def checkpoint_score(step: int, lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return step, score (mean over sources) and sources (`measure`) of a checkpoint's responses."""
    values = dict[str, list[Any]]()
    for line in lines:
        values.setdefault(line["data_source"], []).append([each["value"] for each in line["responses"]])
    sources = {source: measure(each) for source, each in values.items()}
    return {"step": step, "score": statistics.fmean(each["mean"] for each in sources.values()), "sources": sources}


def measure(prompts: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return prompts, n, mean, its interval (low, high) and pass, of n response values to each prompt.

    The interval is Wilson's where there is one response of value 0 or 1, else that of bootstrap draws of prompts.
    pass: {k: pass@k} for k = 1, 2, 4, ... and n, where n > 1 and all values are 0 or 1.
    """
    n, means = len(prompts[0]), [statistics.fmean(prompt) for prompt in prompts]
    binary = all(value in (0, 1) for prompt in prompts for value in prompt)
    low, high = wilson_interval(int(sum(means)), len(means)) if binary and n == 1 else bootstrap_interval(means)
    passes = {}
    if binary and n > 1:
        for k in sorted({n, *(2**power for power in range(n.bit_length()))}):
            passes[k] = statistics.fmean(pass_at_k(n, int(sum(prompt)), k) for prompt in prompts)
    mean = statistics.fmean(means)
    return {"prompts": len(prompts), "n": n, "mean": mean, "low": low, "high": high, "pass": passes}


def wilson_interval(correct: int, count: int) -> tuple[float, float]:
    """Return Wilson's interval for a share, at CONFIDENCE."""
    from scipy.stats import binomtest

    interval = binomtest(correct, count).proportion_ci(CONFIDENCE, "wilson")
    return float(interval.low), float(interval.high)


def bootstrap_interval(means: Sequence[float]) -> tuple[float, float]:
    """Return the bootstrap interval for the mean of `means`, at CONFIDENCE, with seed 0."""
    import numpy as np

    given = np.array(means)
    drawn = np.random.default_rng(0).choice(given, (BOOTSTRAP_DRAWS, len(given))).mean(1)
    low, high = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)
    return float(np.quantile(drawn, low)), float(np.quantile(drawn, high))
