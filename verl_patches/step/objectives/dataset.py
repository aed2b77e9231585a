"""Read fixed responses as a dataset of verl: presets name this file and one of its classes in data.custom_cls.

A row has the prompt as verl's own dataset makes it, and `tools_kwargs`. That is verl's column for a row's tools, which
fit() hands to generate_sequences; here it has the token ids of the responses, and other data that the objective needs
(step/objectives/advantages.py). step/objectives/settings.py lists the columns of each objective. All rows are read at
the start, so that a wrong one ends the run before workers start.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any

import torch
from pyarrow import parquet
from tqdm import tqdm
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_patches.errors import ConfigError
from verl_patches.step.batches.exchange import RaggedTensor, prompt_inputs
from verl_patches.step.objectives.chat import present_fields, read_conversation, split_tokens, step_tokens
from verl_patches.step.objectives.settings import COLUMNS, KIND_TEXTS, file_columns

_TRUNCATIONS = ("error", "left", "right")
_LOG_INTERVAL_S = 10.0  # seconds between the log's counts of checked rows
_VALUE_TESTS: dict[str, Callable[[Any], bool]] = {
    "messages": lambda value: _is_list(value, lambda one: isinstance(one, dict) and {"role", "content"} <= one.keys()),
    "text": lambda value: isinstance(value, str) and value != "",
    "bool": lambda value: isinstance(value, bool),
    "texts": lambda value: _is_list(value, _VALUE_TESTS["text"]),
    "marks": lambda value: _is_list(value, lambda one: isinstance(one, bool | int | float) and 0 <= one <= 1),
    "tools": lambda value: value is None or isinstance(value, str),
    "no tools": lambda value: not value,
}


def _is_list(value: Any, fits: Any) -> bool:
    return isinstance(value, list) and value != [] and all(map(fits, value))


def _prompt(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [*map(present_fields, row["prompt"])]


class FixedDataset(RLHFDataset):
    """Read the rows of an objective; a response ends with the end token and is cut by data.truncation, verl's key.

    Raises ConfigError for a missing column, a value of another kind, a row that the chat template does not write whole
    (chat.py), and, with truncation=error, for a response of more than data.max_response_length tokens; the error names
    file and row, counted from 0.
    """

    objective = "sft"

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None):
        self.most_tokens = config.max_response_length
        if config.truncation not in _TRUNCATIONS:
            raise ConfigError(f"data.truncation is {config.truncation}; expected {' or '.join(_TRUNCATIONS)}")
        super().__init__(data_files, tokenizer, config, processor)

    def _read_files_and_tokenize(self) -> None:
        found = [self._check_file(str(file)) for file in self.data_files]
        if any(columns != found[0] for columns in found):
            raise ConfigError(f"{', '.join(self.data_files)}: expected the same columns in all files, found {found}")
        filters = self.config.get("filter_overlong_prompts", True)
        self.filter_overlong_prompts = filters and "prompt" in found[0]
        super()._read_files_and_tokenize()
        if filters and "messages" in found[0]:
            sizes = [len(self._row_tokens(row)["prompt"]) for row in self.dataframe]
            kept = [number for number, size in enumerate(sizes) if size <= self.max_prompt_length]
            self.dataframe: Any = self.dataframe.select(kept)

    def _check_file(self, file: str) -> dict[str, str]:
        """Check all rows of the file; return the {column: kind} that it is read by."""
        opened = parquet.ParquetFile(file)
        names = opened.schema_arrow.names
        columns = file_columns(self.objective, names)
        if not columns.keys() <= set(names):
            column_sets = " or ".join(", ".join(columns) for columns in COLUMNS[self.objective])
            raise ConfigError(f"{file}: {self.objective} needs the columns {column_sets}; found {', '.join(names)}")
        rows = chain.from_iterable(batch.to_pylist() for batch in opened.iter_batches(columns=[*columns]))
        progress = {"desc": f"check {file}", "unit": "row", "mininterval": _LOG_INTERVAL_S, "delay": _LOG_INTERVAL_S}
        for number, row in enumerate(tqdm(rows, total=opened.metadata.num_rows, **progress)):
            for name, kind in columns.items():
                if not _VALUE_TESTS[kind](row[name]):
                    text = f"{file}, row {number}: {name} is {row[name]!r:.80}; expected {KIND_TEXTS[kind]}, not empty"
                    raise ConfigError(text)
            if fault := self._row_fault(row):
                raise ConfigError(f"{file}, row {number}: {fault}")
        return columns

    def _row_fault(self, row: dict[str, Any]) -> str | None:
        try:
            given = self._row_tokens(row)
        except ValueError as error:
            return str(error)
        longest, limit = max(map(len, given["responses"])), self.max_prompt_length
        if self.truncation != "error":
            return None
        prompt = len(given.get("prompt", ()))
        if prompt > limit and not self.config.get("filter_overlong_prompts", True):
            return f"the prompt has {prompt} tokens; expected at most data.max_prompt_length, {limit}"
        if longest <= self.most_tokens:
            return None
        keys = f"data.max_response_length, {self.most_tokens}: raise it, or set data.truncation to left or right"
        return f"a response has {longest} tokens with the end token; expected at most {keys}"

    def __getitem__(self, item: int) -> dict[str, Any]:
        columns = file_columns(self.objective, self.dataframe.column_names)
        given = self._row_tokens(self.dataframe[item])
        if "prompt" in columns:
            row = super().__getitem__(item)
        else:
            ids, most = given.pop("prompt"), self.max_prompt_length
            prompt = torch.tensor(ids[-most:] if self.truncation == "left" else ids[:most])
            tensors = prompt_inputs(RaggedTensor(prompt, (len(prompt),)), most, self.tokenizer.pad_token_id)
            row = {name: tensor[0] for name, tensor in tensors.items()} | {"raw_prompt_ids": prompt.tolist()}
        row = {name: value for name, value in row.items() if name not in columns}  # text is not sent through the step
        given["responses"] = [self._truncate(ids) for ids in given["responses"]]
        return {**row, "tools_kwargs": given}

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        return [*map(present_fields, super()._build_messages(example))]

    def _truncate(self, ids: list[int]) -> list[int]:
        return ids[-self.most_tokens :] if self.truncation == "left" else ids[: self.most_tokens]

    def _row_tokens(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return {responses: uncut token ids of each response, and other data that the objective needs of a row}.

        `prompt` is among them where the row has no column prompt, which verl's dataset reads.
        """
        if "response" in row:
            return {"responses": [self._response_ids(row, row["response"])]}
        if "messages" in row:
            prompt, response = split_tokens(self.tokenizer, *read_conversation(row))
            return {"prompt": prompt, "responses": [response]}
        ids = self.tokenizer.encode(row["text"])
        if ids[-1] != self.tokenizer.eos_token_id or len(ids) < 2:
            ids.append(self.tokenizer.eos_token_id)
        if self.truncation == "left":
            ids = ids[-self.most_tokens - 1 :]
        return {"prompt": ids[:1], "responses": [ids[1:]]}

    def _response_ids(self, row: dict[str, Any], text: str) -> list[int]:
        return split_tokens(self.tokenizer, [*_prompt(row), {"role": "assistant", "content": text}])[1]


class SftData(FixedDataset):
    """Read sft rows: `prompt` and `response`; `messages`, with `tools`; or `text`, whose first token is the prompt."""


class PairData(FixedDataset):
    """Read dpo and ipo rows: `prompt`, `chosen` and `rejected`."""

    objective = "dpo"

    def _row_tokens(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"responses": [self._response_ids(row, row[name]) for name in ("chosen", "rejected")]}


class RewardData(PairData):
    """Read rm rows like PairData, with a second end token after each response.

    verl's value of a token is that of the sequence before it, so the second one has the value of the whole response.
    """

    objective = "rm"

    def _response_ids(self, row: dict[str, Any], text: str) -> list[int]:
        return [*super()._response_ids(row, text), self.tokenizer.eos_token_id]


class KtoData(FixedDataset):
    """Read kto rows: `prompt`, `response` and `label`, true for a desirable response."""

    objective = "kto"

    def _row_tokens(self, row: dict[str, Any]) -> dict[str, Any]:
        return {"responses": [self._response_ids(row, row["response"])], "label": row["label"]}


class StepData(FixedDataset):
    """Read prm rows: `prompt`, `steps` and `labels`, one for each step.

    marks: {place in the response: label}. verl's value of a token is that of the sequence before it, so a step's value
    is at the token after its last one.
    """

    objective = "prm"

    def _row_fault(self, row: dict[str, Any]) -> str | None:
        if (found := len(row["labels"])) != len(row["steps"]):
            return f"found {len(row['steps'])} steps and {found} labels; expected a label for each step"
        return super()._row_fault(row)

    def _row_tokens(self, row: dict[str, Any]) -> dict[str, Any]:
        parts, rest = step_tokens(self.tokenizer, _prompt(row), row["steps"])
        ids = [*chain.from_iterable(parts), *rest]
        dropped = max(len(ids) - self.most_tokens, 0) if self.truncation == "left" else 0
        ends = [end - dropped for end in accumulate(map(len, parts))]
        marks = {end: float(y) for end, y in zip(ends, row["labels"], strict=True) if 0 < end < self.most_tokens}
        return {"responses": [ids], "marks": marks}
