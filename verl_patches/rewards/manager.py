"""Adds up the parts of recipe.rewards for a batch, in place of verl's reward managers (row reward.parts).

verl's managers know one function, and return the scores of a reward model in place of its own. Functions run one
response after the other in the controller, as with verl's `naive`.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from verl import DataProto

from verl_patches.errors import RecipeError, place_in
from verl_patches.rewards import by_source, learnable, maths
from verl_patches.rewards.parts import METRIC, TAKES, Part, length_penalty, parts_of

_FUNCTIONS = {
    "maths": maths.compute_score,
    "by_source": by_source.compute_score,
    "learnable": learnable.compute_score,
    "format": maths.format_score,
}
RM_SCORES = "rm_scores"  # [B, S_response], of verl's reward model


class RewardError(RecipeError):
    """A part of the reward failed; names the part, the sample, and the line of the user's file."""


class Sample(NamedTuple):
    """What a function sees of one response; `tokens`: its length."""

    data_source: Any
    text: str
    ground_truth: Any
    extra_info: Any
    tokens: int


Score = Callable[[Sample], Any]  # a number, or a dict with `score` and more columns


class RewardManager:
    """Callable as verl's reward managers; `parts`: with None as the score of a reward model.

    validates: for verl's validation, which runs no reward model, so that its part is left out.
    """

    def __init__(
        self, parts: Sequence[tuple[Part, Score | None]], tokenizer: Any, reward_fn_key: str, validates: bool = False
    ):
        self.parts, self.tokenizer, self.reward_fn_key, self.validates = parts, tokenizer, reward_fn_key, validates
        self._error: Exception | None = None

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Rewards [B, S_response] fp32, on the last token of each response but for a reward model's; zeros of no part.

        With `return_dict` also, as reward_extra_info, columns of B values: reward/LABEL, the score of each part without
        its weight, and what functions return beside `score`; of two equal names that of the earlier part.

        Raises RewardError, at any later call too: verl's compute_reward prints the error of a first call and makes a
        second, which would train on rewards of a part that had failed.
        """
        if self._error is not None:
            raise self._error
        try:
            rewards, columns = self._add_up(data)
        except Exception as error:
            self._error = error
            raise
        return {"reward_tensor": rewards, "reward_extra_info": columns} if return_dict else rewards

    def _add_up(self, data: DataProto) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        responses, others = data.batch["responses"], data.non_tensor_batch
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(-1)
        rewards, columns = torch.zeros(responses.shape), {}
        totals = torch.zeros(len(responses), dtype=torch.float64)
        samples = self._samples(responses, lengths.tolist(), others)
        for part, score in self.parts:
            if score is not None:
                values, more = _results(part, score, samples, others)
                totals += part.entry.weight * torch.tensor(values, dtype=torch.float64)
                columns = more | columns
            elif self.validates:
                continue
            elif RM_SCORES in data.batch.keys():
                rewards += part.entry.weight * data.batch[RM_SCORES]
                values = data.batch[RM_SCORES].sum(-1).tolist()
            else:
                text = f"{_named(part)}: the batch has no {RM_SCORES}; expected those of reward_model.enable=true"
                raise RewardError(text)
            columns[f"{METRIC}{part.label}"] = values
        rewards[torch.arange(len(responses)), lengths - 1] += totals.float()
        return rewards, columns

    def _samples(self, responses: torch.Tensor, lengths: list[int], others: Mapping[str, Any]) -> list[Sample]:
        """One a response; rows without a gold answer have None."""
        if not self.parts:
            return []
        nothing = [None] * len(lengths)
        sources, golds, infos = (others.get(n, nothing) for n in (self.reward_fn_key, "reward_model", "extra_info"))
        return [
            Sample(
                sources[row],
                self.tokenizer.decode(responses[row][:tokens], skip_special_tokens=True),
                (golds[row] or {}).get("ground_truth"),
                infos[row],
                tokens,
            )
            for row, tokens in enumerate(lengths)
        ]


def _results(
    part: Part, score: Score, samples: Sequence[Sample], others: Mapping[str, Any]
) -> tuple[list[float], dict[str, list[Any]]]:
    """(scores, other columns) of one part; RewardError names the sample."""
    values: list[float] = []
    columns: dict[str, list[Any]] = {}
    for row, sample in enumerate(samples):
        uid = f", uid {others['uid'][row]}" if "uid" in others else ""
        place = f"sample {row} of the batch (data_source {sample.data_source!r}{uid})"
        try:
            result = score(sample)
            found = dict(result) if isinstance(result, Mapping) else {"score": result}
            values.append(float(found.pop("score")))
        except Exception as error:
            raise _failed(part, error, place) from error
        if not math.isfinite(values[-1]) or (row and found.keys() != columns.keys()):
            expected = f"a finite score and the keys of the first response, {', '.join(columns) or 'none'}"
            raise RewardError(f"{_named(part)}, {place}: expected {expected}; found {result!r}")
        for name, value in found.items():
            columns.setdefault(name, []).append(value)
    return values, columns


def _named(part: Part) -> str:
    return f"{part.where} ({part.entry.name})"


def _failed(part: Part, error: Exception, place: str) -> RewardError:
    line = place_in("".join(traceback.format_exception(error)), part.entry.path)
    return RewardError(f"{_named(part)}, {place}: {line}{type(error).__name__}: {error}")


def load_parts(original: Callable) -> Callable:
    """Provider for verl's load_reward_manager: a RewardManager with the parts of the configuration."""

    @functools.wraps(original)
    def load(config: Any, tokenizer: Any, num_examine: int, **kwargs: Any) -> RewardManager:
        from verl.trainer.ppo.reward import get_custom_reward_fn

        def score_of(part: Part) -> Score | None:
            entry, options = part.entry, {}
            if entry.name == "reward_model":
                return None
            if entry.name == "length":
                longest = config.data.max_response_length
                return lambda sample: length_penalty(sample.tokens, longest, entry.buffer_of(longest))
            if entry.name == "python":
                named = {"path": entry.path, "name": entry.function, "reward_kwargs": entry.kwargs}
                try:
                    function = get_custom_reward_fn({"custom_reward_function": named})
                except Exception as error:
                    raise _failed(part, error, "while it is loaded") from error
            elif entry.name == "data_source":
                function = original(config, tokenizer, num_examine).compute_score
            else:
                function, options = _FUNCTIONS[entry.name], {key: getattr(entry, key) for key in TAKES[entry.name]}
            return lambda sample: function(
                data_source=sample.data_source,
                solution_str=sample.text,
                ground_truth=sample.ground_truth,
                extra_info=sample.extra_info,
                **options,
            )

        parts = [(part, score_of(part)) for part in parts_of(config)]
        return RewardManager(parts, tokenizer, config.data.reward_fn_key, validates=num_examine > 0)

    return load
