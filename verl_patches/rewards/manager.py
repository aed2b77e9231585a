"""Add up the parts of recipe.rewards for a batch, in place of verl's reward managers (patch row reward.parts).

verl's managers call one function, and a reward model's scores replace its result. Functions run in the controller,
one response after the other, as in verl's `naive` manager; a `python` entry with timeout_s in a helper process.
"""

from __future__ import annotations

import functools
import numbers
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from verl import DataProto

from verl_patches.errors import ConfigError, RecipeError, traceback_location
from verl_patches.recipe import REWARD_KEYS, Part
from verl_patches.rewards import by_source, functions, learnable, maths
from verl_patches.rewards.functions import ResultError
from verl_patches.rewards.helper_process import CallError, HelperProcess, LimitError
from verl_patches.rewards.parts import REWARD_PREFIX, RM_SCORES, SECONDS, TIMED_OUT, length_penalty, reward_parts

_FUNCTIONS = {
    "maths": maths.compute_score,
    "by_source": by_source.compute_score,
    "learnable": learnable.compute_score,
    "format": maths.format_score,
}
MADE_UP_ANSWER = r"This is a made-up answer: \boxed{0}"
TRY_S = 120.0  # limit of a part's call for the made-up answer, which loads a file, without timeout_s


class Sample(NamedTuple):
    """Hold verl's keywords of a response, its number of tokens, the words that name it in errors, RM_SCORES of it."""

    keywords: dict[str, Any]
    tokens: int
    place: str
    model_scores: Sequence[float] = ()


Score = Callable[[Sample], tuple[float, dict[str, Any]]]  # returns (score, other values)


class RewardError(RecipeError):
    """Report that a part of the reward failed; the message names part, sample, and the line of the user's file."""


@dataclass
class RewardManager:
    """Compute rewards of a batch; called like verl's reward managers.

    validates: for verl's validation, whose columns have neither parts' other numbers nor seconds.
    first: {label of a part: values beside the score of its first response}, whose keys all others must have.
    """

    parts: Sequence[tuple[Part, Score]]
    tokenizer: Any
    reward_fn_key: str
    validates: bool = False
    error: Exception | None = None
    first: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __call__(self, data: DataProto, return_dict: bool = False) -> torch.Tensor | dict[str, Any]:
        """Return rewards [B, S_response] fp32, on the last token of each response; zeros without parts.

        With `return_dict` also, as reward_extra_info, columns of B values: reward/LABEL, each part's score without its
        weight, and other values that functions return beside `score`; the earlier part wins for equal names. Except in
        validation also reward/LABEL/KEY, every part's values that are numbers, and SECONDS, the time of each sample.

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

    def try_row(self, row: Mapping[str, Any], where: str) -> str:
        """Score a made-up answer to a row of the data, before anything else starts; return what each part gave.

        Raises ConfigError for all that would fail at a real answer, and where a part takes more than TRY_S.
        """
        sample, scores = Sample(self._keywords(row, MADE_UP_ANSWER), 1, f"a made-up answer to {where}"), []
        for part, score in self.parts:
            if part.entry.name == "reward_model":  # no model runs yet
                continue
            began = time.perf_counter()
            try:
                with functions.time_limit(TRY_S) if part.entry.timeout_s is None else nullcontext():
                    value, self.first[part.label] = score(sample)
            except Exception as error:
                raise ConfigError(str(part_error(part, error, sample.place))) from error
            scores.append(f"{part.label} {value:g} ({time.perf_counter() - began:.1f} s)")
        return ", ".join(scores)

    def _add_up(self, data: DataProto) -> tuple[torch.Tensor, dict[str, list[Any]]]:
        responses = data.batch["responses"]
        lengths = data.batch["attention_mask"][:, -responses.shape[1] :].sum(-1)
        rewards, columns = torch.zeros(responses.shape), dict[str, list[Any]]()
        totals, seconds = torch.zeros(len(responses), dtype=torch.float64), [0.0] * len(responses)
        samples = self._samples(data, lengths.tolist()) if self.parts else []
        for part, score in self.parts:
            name = f"{REWARD_PREFIX}{part.label}"
            values, more = self._results(part, score, samples, seconds)
            columns = more | columns
            for key, column in () if self.validates else more.items():
                if all(isinstance(value, numbers.Real) for value in column):
                    columns[f"{name}/{key}"] = column
            totals += part.entry.weight * torch.tensor(values, dtype=torch.float64)
            columns[name] = values
        if samples and not self.validates:
            columns[SECONDS] = seconds
        rewards[torch.arange(len(responses)), lengths - 1] += totals.float()
        return rewards, columns

    def _samples(self, data: DataProto, lengths: Sequence[int]) -> list[Sample]:
        responses, models = data.batch["responses"], sum(part.entry.name == "reward_model" for part, _ in self.parts)
        scores = data.batch.get(RM_SCORES, None) if models else torch.empty(len(responses), 0)
        if scores is None or scores.shape[1:] != (models,):
            found = "none" if scores is None else f"{list(scores.shape)}"
            shape = f"{[len(responses), models]}, found {found}; patch row reward.models must be on"
            raise RewardError(f"recipe.rewards: expected {RM_SCORES} [responses, reward models] of shape {shape}")
        samples = []
        for number, (ids, tokens) in enumerate(zip(responses, lengths, strict=True)):
            row = {name: column[number] for name, column in data.non_tensor_batch.items()}
            uid = f", uid {row['uid']}" if "uid" in row else ""
            place = f"sample {number} of the batch (data_source {row.get(self.reward_fn_key)!r}{uid})"
            text = self.tokenizer.decode(ids[:tokens], skip_special_tokens=True)
            samples.append(Sample(self._keywords(row, text), tokens, place, scores[number].tolist()))
        return samples

    def _keywords(self, row: Mapping[str, Any], response: str) -> dict[str, Any]:
        """Return verl's keywords of a response to a row of the data; None stands for what the row lacks."""
        gold = (row.get("reward_model") or {}).get("ground_truth")
        given = {"data_source": row.get(self.reward_fn_key), "ground_truth": gold, "extra_info": row.get("extra_info")}
        return {**given, "solution_str": response}

    def _results(
        self, part: Part, score: Score, samples: Sequence[Sample], seconds: list[float]
    ) -> tuple[list[float], dict[str, list[Any]]]:
        """Return (scores, columns of other values) of one part, and add each sample's time to `seconds`.

        A sample that took more than timeout_s has score 0, and empty other values. RewardError names the sample.
        """
        results: list[tuple[float, dict[str, Any] | None]] = []
        for row, sample in enumerate(samples):
            began = time.perf_counter()
            try:
                value, found = score(sample)
                if found.keys() != (first := self.first.setdefault(part.label, found)).keys():
                    expected = ", ".join(first) or "none"
                    raise ResultError(f"expected the keys of the first response, {expected}; found {', '.join(found)}")
                results.append((value, found))
            except LimitError:
                results.append((0.0, None))
            except Exception as error:
                raise part_error(part, error, sample.place) from error
            seconds[row] += time.perf_counter() - began
        empty = {key: "" if isinstance(value, str) else 0.0 for key, value in self.first.get(part.label, {}).items()}
        columns = {key: [(found or empty)[key] for _, found in results] for key in empty}
        if part.entry.timeout_s is not None:
            columns[TIMED_OUT] = [float(found is None) for _, found in results]
        return [value for value, _ in results], columns


def part_error(part: Part, error: Exception, place: str) -> RewardError:
    """Return a part's error, with the last line of the user's file that led to it, here or in a helper process."""
    line = traceback_location("".join(traceback.format_exception(error)), part.entry.path)
    kind = "" if isinstance(error, ConfigError | ResultError | CallError) else f"{type(error).__name__}: "
    more = f"; {part.where}.timeout_s is its limit" if isinstance(error, LimitError) else ""
    return RewardError(f"{part}, {place}: {line}{kind}{error}{more}")


def load_parts(original: Callable) -> Callable:
    """Wrap verl's load_reward_manager: return a RewardManager with the parts of the configuration.

    The parts are read here, not from the facts that `run_from_config` returns: without the launcher these are written
    only when the trainer is made (import_alone.py), and verl 0.4.0's main loads rewards before that.
    """

    @functools.wraps(original)
    def load(config: Any, tokenizer: Any, num_examine: int, **kwargs: Any) -> RewardManager:
        longest = config.data.max_response_length
        verls_manager = functools.partial(original, config, tokenizer, num_examine)
        parts = [part for part in reward_parts(config) if not num_examine or part.entry.name != "reward_model"]
        models = [part for part in parts if part.entry.name == "reward_model"]
        scored = [(part, _score_function(part, longest, verls_manager, models)) for part in parts]
        return RewardManager(scored, tokenizer, config.data.reward_fn_key, validates=num_examine > 0)

    return load


def _score_function(part: Part, longest: int, verls_manager: Callable[[], Any], models: list[Part]) -> Score:
    """Return the score of a part; `models`: the parts with a reward model, in the order of RM_SCORES."""
    entry, options = part.entry, {}
    if entry.name == "reward_model":
        number = models.index(part)
        return lambda sample: functions.read_result(sample.model_scores[number], "the model")
    if entry.name == "length":
        return lambda sample: (length_penalty(sample.tokens, longest, entry.penalty_tokens(longest)), {})
    if entry.name == "python":
        return _python_score(part)
    if entry.name == "data_source":
        function = verls_manager().compute_score
    else:
        function, options = _FUNCTIONS[entry.name], {key: getattr(entry, key) for key in REWARD_KEYS[entry.name]}
    return lambda sample: functions.read_result(function(**sample.keywords, **options), entry.name)


def _python_score(part: Part) -> Score:
    """Return the score of a Python file's function: called here, or with a time limit in a helper process."""
    given, limit_s = (part.path, part.entry.function, part.entry.kwargs), part.entry.timeout_s
    if limit_s is None:
        return lambda sample: functions.score_response(*given, sample.keywords)
    helper = HelperProcess(f"{functions.__name__}:score_response", given, memory_bytes=0)
    return lambda sample: helper.call(*given, sample.keywords, wall_limit_s=limit_s)
