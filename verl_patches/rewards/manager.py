"""Add up the parts of recipe.rewards for a batch, in place of verl's reward managers (row reward.parts).

verl's managers call one function, and a reward model's scores replace its result. Functions run in the controller,
one response after the other, as in verl's `naive` manager.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from verl import DataProto

from verl_patches.errors import RecipeError, traceback_location
from verl_patches.recipe import REWARD_KEYS, Part
from verl_patches.rewards import by_source, learnable, maths
from verl_patches.rewards.parts import REWARD_PREFIX, RM_SCORES, length_penalty, reward_parts

_FUNCTIONS = {
    "maths": maths.compute_score,
    "by_source": by_source.compute_score,
    "learnable": learnable.compute_score,
    "format": maths.format_score,
}
# (verl's keywords of a response, its tokens) -> a number, or a dict with `score` and others; None for a reward model
Score = Callable[[dict[str, Any], int], Any]


class RewardError(RecipeError):
    """Report that a part of the reward failed; the message names part, sample, and the line of the user's file."""


@dataclass
class RewardManager:
    """Compute rewards of a batch; called like verl's reward managers.

    validates: for verl's validation, which runs no reward model, so that a reward model's part is left out.
    """

    parts: Sequence[tuple[Part, Score | None]]
    tokenizer: Any
    reward_fn_key: str
    validates: bool = False
    error: Exception | None = None

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Return rewards [B, S_response] fp32, on the last token of each response; zeros without parts.

        With `return_dict` also, as reward_extra_info, columns of B values: reward/LABEL, each part's score without its
        weight, and other values that functions return beside `score`; the earlier part wins for equal names.

        Raises RewardError, and again at every later call: verl's compute_reward prints the error of a first call and
        makes a second, which would train on rewards of a failed part.
        """
        if self.error is not None:
            raise self.error
        try:
            rewards, columns = self._add_up(data)
        except Exception as error:
            self.error = error
            raise
        return {"reward_tensor": rewards, "reward_extra_info": columns} if return_dict else rewards

    def _add_up(self, data: DataProto) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        responses = data.batch["responses"]
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(-1)
        rewards, columns = torch.zeros(responses.shape), dict[str, list[Any]]()
        totals = torch.zeros(len(responses), dtype=torch.float64)
        samples = self._samples(data, lengths.tolist()) if self.parts else []
        uids, model_index = data.non_tensor_batch.get("uid"), 0
        scores, expected = data.batch.get(RM_SCORES, None), (sum(score is None for _, score in self.parts),)
        for part, score in self.parts:
            if score is not None:
                values, more = _results(part, score, samples, uids)
                columns = more | columns
            elif self.validates:
                continue
            elif scores is None or scores.shape[1:] != expected:
                found = "none" if scores is None else f"{list(scores.shape)}"
                shape = f"{[len(responses), *expected]}, found {found}; row reward.models computes them"
                raise RewardError(f"{part}: expected {RM_SCORES} [responses, reward models] of shape {shape}")
            else:
                values, model_index = scores[:, model_index].tolist(), model_index + 1
                for row, value in enumerate(values):
                    if not math.isfinite(value):
                        raise RewardError(f"{part}, sample {row} of the batch: expected a finite score, found {value}")
            totals += part.entry.weight * torch.tensor(values, dtype=torch.float64)
            columns[f"{REWARD_PREFIX}{part.label}"] = values
        rewards[torch.arange(len(responses)), lengths - 1] += totals.float()
        return rewards, columns

    def _samples(self, data: DataProto, lengths: Sequence[int]) -> list[tuple[dict[str, Any], int]]:
        """Return (verl's keywords, tokens) of each response; the gold answer of rows without one is None."""
        nothing, names = [None] * len(lengths), (self.reward_fn_key, "reward_model", "extra_info")
        columns = (data.non_tensor_batch.get(name, nothing) for name in names)
        samples = []
        for ids, tokens, source, gold, info in zip(data.batch["responses"], lengths, *columns, strict=True):
            keywords = {"data_source": source, "ground_truth": (gold or {}).get("ground_truth"), "extra_info": info}
            text = self.tokenizer.decode(ids[:tokens], skip_special_tokens=True)
            samples.append(({**keywords, "solution_str": text}, tokens))
        return samples


def _results(
    part: Part, score: Score, samples: Sequence[tuple[dict[str, Any], int]], uids: Sequence[str] | None
) -> tuple[list[float], dict[str, list[Any]]]:
    """Return (scores, other columns) of one part; RewardError names the sample."""
    values: list[float] = []
    columns: dict[str, list[Any]] = {}
    for row, (keywords, tokens) in enumerate(samples):
        uid = "" if uids is None else f", uid {uids[row]}"
        place = f"sample {row} of the batch (data_source {keywords['data_source']!r}{uid})"
        try:
            result = score(keywords, tokens)
            found = dict(result) if isinstance(result, Mapping) else {"score": result}
            values.append(float(found.pop("score")))
        except Exception as error:
            raise part_error(part, error, place) from error
        if not math.isfinite(values[-1]) or (row and found.keys() != columns.keys()):
            expected = f"a finite score and the keys of the first response, {', '.join(columns) or 'none'}"
            raise RewardError(f"{part}, {place}: expected {expected}; found {result!r}")
        for name, value in found.items():
            columns.setdefault(name, []).append(value)
    return values, columns


def part_error(part: Part, error: Exception, place: str) -> RewardError:
    """Return a part's error, with the last line of the user's file that led to it, in another process too."""
    line = traceback_location("".join(traceback.format_exception(error)), part.entry.path)
    return RewardError(f"{part}, {place}: {line}{type(error).__name__}: {error}")


def load_parts(original: Callable) -> Callable:
    """Wrap verl's load_reward_manager: return a RewardManager with the parts of the configuration.

    The parts do not come from `run_from_config`: without the launcher its facts are written when the trainer is made
    (import_alone.py), and verl 0.4.0's main loads rewards before that.
    """

    @functools.wraps(original)
    def load(config: Any, tokenizer: Any, num_examine: int, **kwargs: Any) -> RewardManager:
        longest = config.data.max_response_length
        verls_manager = functools.partial(original, config, tokenizer, num_examine)
        parts = [(part, _score_function(part, longest, verls_manager)) for part in reward_parts(config)]
        return RewardManager(parts, tokenizer, config.data.reward_fn_key, validates=num_examine > 0)

    return load


def _score_function(part: Part, longest: int, verls_manager: Callable[[], Any]) -> Score | None:
    from verl.trainer.ppo.reward import get_custom_reward_fn  # not at the top: this import applies our row

    entry, options = part.entry, {}
    if entry.name == "reward_model":
        return None
    if entry.name == "length":
        return lambda keywords, tokens: length_penalty(tokens, longest, entry.penalty_tokens(longest))
    if entry.name == "python":
        named = {"path": entry.path, "name": entry.function, "reward_kwargs": entry.kwargs}
        try:
            function = get_custom_reward_fn({"custom_reward_function": named})
        except Exception as error:
            raise part_error(part, error, "while it is loaded") from error
    elif entry.name == "data_source":
        function = verls_manager().compute_score
    else:
        function, options = _FUNCTIONS[entry.name], {key: getattr(entry, key) for key in REWARD_KEYS[entry.name]}
    return lambda keywords, tokens: function(**keywords, **options)
