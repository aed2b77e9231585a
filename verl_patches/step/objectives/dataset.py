"""Read fixed responses as a dataset of verl: presets name this file and its class in data.custom_cls.

A row has the prompt as verl's own dataset makes it, and `tools_kwargs`. That is verl's column for a row's tools, which
fit() hands to generate_sequences; here it has the token ids of the responses, and other data that the objective needs
(step/objectives/advantages.py). step/objectives/settings.py lists the columns of each objective. All rows are read at
the start, so that a wrong one ends the run before workers start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from verl.utils.dataset.rl_dataset import RLHFDataset

from verl_patches.errors import ConfigError
from verl_patches.step.batches.exchange import RaggedTensor, prompt_inputs
from verl_patches.step.objectives.chat import row_tokens
from verl_patches.step.objectives.settings import COLUMNS, file_columns
from verl_patches.step.rows import read_checked_rows
from verl_patches.values import value_faults

_TRUNCATIONS = ("error", "left", "right")


class FixedDataset(RLHFDataset):
    """Read the rows of recipe.objective; a response ends with the end token and is cut by data.truncation, verl's key.

    Raises ConfigError for a missing column, a value of another kind, a row that the chat template does not write whole
    (chat.py), and, with truncation=error, for a response of more than data.max_response_length tokens; the error names
    file and row, counted from 0.
    """

    def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None):
        self.objective, self.most_tokens = config._get_parent().recipe.objective.name, config.max_response_length
        if config.truncation not in _TRUNCATIONS:
            raise ConfigError(f"data.truncation is {config.truncation}; expected {' or '.join(_TRUNCATIONS)}")
        super().__init__(data_files, tokenizer, config, processor)

    def _read_files_and_tokenize(self) -> None:
        read_checked_rows(self, super()._read_files_and_tokenize, self._check_rows)

    def _check_rows(self, rows: list[dict[str, Any]]) -> Iterator[tuple[str | None, int]]:
        """Yield (fault or None, tokens of the prompt) of each row; raise ConfigError where the files lack columns."""
        columns = file_columns(self.objective, rows[0])
        if not columns.keys() <= rows[0].keys():
            needed = " or ".join(", ".join(columns) for columns in COLUMNS[self.objective])
            found = f"{self.objective} needs the columns {needed}; found {', '.join(rows[0])}"
            raise ConfigError(f"{', '.join(self.data_files)}: {found}")
        for row in rows:
            row = {name: row[name] for name in columns}
            try:
                faults = value_faults(columns, row)
                yield faults[0] if faults else None, 0 if faults else self._prompt_size(row)
            except ValueError as error:
                yield str(error), 0

    def _prompt_size(self, row: dict[str, Any]) -> int:
        """Return the number of a prompt's tokens; raise ValueError for a row that cannot be trained."""
        given = self._row_tokens(row)
        longest = max(map(len, given["responses"]))
        if self.truncation == "error" and longest > self.most_tokens:
            keys = f"data.max_response_length, {self.most_tokens}: raise it, or set data.truncation to left or right"
            raise ValueError(f"a response has {longest} tokens with the end token; expected at most {keys}")
        return len(given["prompt"])

    def __getitem__(self, item: int) -> dict[str, Any]:
        row, most = self.dataframe[item], self.max_prompt_length
        columns = file_columns(self.objective, row)  # their text is not sent through the step
        given = self._row_tokens({name: row.pop(name) for name in columns})
        ids = given.pop("prompt")
        prompt = torch.tensor(ids[-most:] if self.truncation == "left" else ids[:most])
        tensors = prompt_inputs(RaggedTensor(prompt, (len(prompt),)), most, self.tokenizer.pad_token_id)
        row |= {name: tensor[0] for name, tensor in tensors.items()} | {"raw_prompt_ids": prompt.tolist()}
        kept = slice(-self.most_tokens, None) if self.truncation == "left" else slice(self.most_tokens)
        return {**row, "tools_kwargs": {**given, "responses": [ids[kept] for ids in given["responses"]]}}

    def _row_tokens(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return {prompt: its token ids, responses: uncut ids of each, and other data that the objective needs}.

        rm: a second end token follows each response. verl's value of a token is that of the sequence before it, so the
        second one has the value of the whole response. prm: marks, {place in the response: label}; for the same reason
        a step's is at the token after its last one. Raises ValueError for a row that the chat template does not write
        whole (chat.py).
        """
        steps, labels = row.get("steps", []), row.get("labels", [])
        if len(steps) != len(labels):
            raise ValueError(f"found {len(steps)} steps and {len(labels)} labels; expected a label for each step")
        prompt, by_column, ends = row_tokens(self.tokenizer, row)
        responses = [*by_column.values()]
        if "text" in row and self.truncation == "left":
            ids = [*prompt, *responses[0]][-self.most_tokens - 1 :]
            prompt, responses = ids[:1], [ids[1:]]
        given: dict[str, Any] = {"prompt": prompt, "responses": responses}
        if self.objective == "rm":
            given["responses"] = [[*ids, self.tokenizer.eos_token_id] for ids in responses]
        elif self.objective == "kto":
            given["label"] = row["label"]
        elif self.objective == "prm":
            dropped = max(len(responses[0]) - self.most_tokens, 0) if self.truncation == "left" else 0
            marks = {end - dropped: float(label) for end, label in zip(ends, labels, strict=True)}
            given["marks"] = {end: label for end, label in marks.items() if 0 < end < self.most_tokens}
        return given
