"""Check all rows of a run's data files before workers start, and read those left (patch row data.checked_rows).

A bad row, which would end the run later or could never score, is refused by file and row (counted from 0), or dropped
with recipe.data.skip_bad_rows. Prompts over data.max_prompt_length are left out as data.filter_overlong_prompts says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from omegaconf import OmegaConf
from tqdm import tqdm

from verl_patches.errors import ConfigError
from verl_patches.rewards.gold import GoldCheck
from verl_patches.rewards.parts import reward_parts
from verl_patches.step.objectives.chat import render

_BATCH_ROWS = 512
_LOG_INTERVAL_S = 10.0  # seconds between the log's counts of checked rows
_SKIP_KEY = "recipe.data.skip_bad_rows"


def check_rl_rows(read: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap RLHFDataset._read_files_and_tokenize: check the rows; those of a subclass are for the subclass to check."""

    @functools.wraps(read)
    def checked(self: Any) -> None:
        from verl.utils.dataset.rl_dataset import RLHFDataset  # not at the top: these imports apply our patches
        from verl.workers.reward_manager import NaiveRewardManager

        if type(self) is not RLHFDataset:
            read(self)
            return
        whole = self.config._get_parent()  # None where a script makes a dataset
        gold = GoldCheck(reward_parts(whole) if whole else (), NaiveRewardManager(None, 0).compute_score)
        skipped = ", ".join(map(str, gold.skipped))
        unchecked = f"whether gold answers can score was not checked for {skipped}" if skipped else ""
        check_rows = functools.partial(_check_rl_rows, self, gold)
        RowCheck(self, check_rows, unchecked=unchecked).read(functools.partial(read, self))

    return checked


def render_chat(tokenizer: Any, messages: Any) -> str:
    """Return the template's text of messages and generation prompt, as verl's RLHFDataset does, or raise ValueError."""
    if not isinstance(messages, list) or not messages:
        found = "none" if messages is None else type(messages).__name__
        raise ValueError(f"expected text or a list of messages, found {found}")
    for each in messages:
        for name in ("role", "content"):
            if not isinstance(each, dict) or not isinstance(each.get(name), str):
                found = f"{each.get(name)!r:.60} as {name}" if isinstance(each, dict) else type(each).__name__
                raise ValueError(f"expected role and content in each message, both text, found {found}")
    return render(tokenizer, messages)


class RowCheck:
    """Check the rows of `dataset`, verl's RLHFDataset.

    check_rows: yields (what is wrong or None, number of the prompt's tokens) of some rows. columns: those that it
    reads; None: all. unchecked: what could not be checked, for the report.
    """

    def __init__(
        self,
        dataset: Any,
        check_rows: Callable[[list[dict[str, Any]]], Iterable[tuple[str | None, int]]],
        columns: list[str] | None = None,
        unchecked: str = "",
    ):
        self.dataset, self.check_rows, self.columns, self.unchecked = dataset, check_rows, columns, unchecked
        self.files, self.limit = [str(file) for file in dataset.data_files], dataset.max_prompt_length
        self.filters = dataset.config.get("filter_overlong_prompts", True)
        whole = dataset.config._get_parent()
        self.skips = bool(whole and OmegaConf.select(whole, _SKIP_KEY))
        self.rows = self.bad = self.over = self.most_tokens = 0
        self.first_bad = self.longest = ""

    def read(self, read: Callable[[], None]) -> None:
        """Check all rows, then `read` them (verl's method) and keep those that are left.

        The dataset gets `row_report`, a sentence about what was left out or not checked, or "". Raises ConfigError for
        a bad row, and where fewer rows than a batch are left.
        """
        _require_same_columns(self.files)
        kept = np.array([keeps for file in self.files for keeps in self._check_file(file)], dtype=bool)
        config, given = self.dataset.config, self.dataset.original_data_files
        trains = given in (config.get("train_files"), [config.get("train_files")])
        least = config.train_batch_size if trains else 1
        more = f" and {len(self.files) - 1} more" if len(self.files) > 1 else ""
        left, details = f"{kept.sum()} of {self.rows} rows of {self.files[0]}{more} are used", self._details()
        if kept.sum() < least:
            raise ConfigError(f"data: {left}; expected at least {least}, a batch" + (f"; {details}" if details else ""))
        self.dataset.row_report = f"data: {left}; {details}" if details else ""
        self.dataset.filter_overlong_prompts = False  # done here
        read()
        if not kept.all():
            self.dataset.dataframe = self.dataset.dataframe.select(np.flatnonzero(kept))

    def _check_file(self, file: str) -> Iterator[bool]:
        """Yield for each row whether it is kept."""
        from pyarrow import parquet

        progress = {"desc": f"check {file}", "unit": "row", "mininterval": _LOG_INTERVAL_S, "delay": _LOG_INTERVAL_S}
        with parquet.ParquetFile(file) as opened, tqdm(total=opened.metadata.num_rows, **progress) as bar:
            number = 0
            for batch in opened.iter_batches(_BATCH_ROWS, columns=self.columns):
                for fault, tokens in self.check_rows(batch.to_pylist()):
                    yield self._keeps(f"{file}, row {number}", fault, tokens)
                    number += 1
                    bar.update()
        self.rows += number

    def _keeps(self, place: str, fault: str | None, tokens: int) -> bool:
        """Count a row and return whether it is kept; raise ConfigError for a bad one that is not to be dropped."""
        is_long = fault is None and tokens > self.limit
        if is_long and not self.filters and self.dataset.truncation == "error":
            fault = f"the prompt has {tokens} tokens; expected at most data.max_prompt_length, {self.limit}: raise it, "
            fault += "or set data.filter_overlong_prompts=true, which leaves such rows out"
        if fault and not self.skips:
            raise ConfigError(f"{place}: {fault}; {_SKIP_KEY}=true drops such rows")
        if fault:
            self.bad, self.first_bad = self.bad + 1, self.first_bad or f"{place}: {fault}"
            return False
        if is_long:
            self.over += 1
            if tokens > self.most_tokens:
                self.most_tokens, self.longest = tokens, place
        return not (is_long and self.filters)

    def _details(self) -> str:
        """Return what was left out, cut or not checked; empty without any of these."""
        parts = [f"bad and dropped: {self.bad}, the first is {self.first_bad}"] if self.bad else []
        if self.over:
            done = "left out" if self.filters else f"cut (data.truncation={self.dataset.truncation})"
            text = f"prompts over data.max_prompt_length, {self.limit}, {done}: {self.over}"
            parts.append(f"{text}, the longest has {self.most_tokens} tokens ({self.longest})")
        return "; ".join([*parts, self.unchecked] if self.unchecked else parts)


def _require_same_columns(files: list[str]) -> None:
    """Raise ConfigError where verl could not join a column of the files, or would fill extra_info with null."""
    from datasets import Features
    from pyarrow import parquet

    first = Features.from_arrow_schema(parquet.read_schema(files[0]))
    for file in files[1:]:
        found = Features.from_arrow_schema(parquet.read_schema(file))
        for name in {"extra_info", *(first.keys() & found.keys())}:
            if found.get(name) != first.get(name):
                text = f"column {name} is {found.get(name, 'absent')}; expected {first.get(name, 'none')}"
                text += f", as in {files[0]}: write all files alike, as `data build` does (docs/data.md)"
                raise ConfigError(f"{file}: {text}")


def _check_rl_rows(dataset: Any, gold: GoldCheck, rows: list[dict[str, Any]]) -> Iterator[tuple[str | None, int]]:
    """Yield (fault or None, tokens of the prompt) of each row of RL."""
    faults, texts, key = list[str | None](), list[str](), dataset.prompt_key
    for row in rows:
        text, fault = "", None
        try:
            text = render_chat(dataset.tokenizer, row[key])
        except ValueError as error:
            fault = f"{key}: {error}"
        texts.append(text)
        faults.append(fault or _rl_row_fault(dataset, gold, row))
    ids = dataset.tokenizer(texts, add_special_tokens=False)["input_ids"]
    yield from zip(faults, map(len, ids), strict=True)


def _rl_row_fault(dataset: Any, gold: GoldCheck, row: dict[str, Any]) -> str | None:
    """Return what is wrong with a row whose prompt is well formed, or None."""
    prompt, info = row[dataset.prompt_key], row.get("extra_info", {})
    if prompt[-1]["role"] == "assistant":
        return f"{dataset.prompt_key} ends with a message of assistant; expected a last message of user or tool"
    for name in (dataset.image_key, dataset.video_key):
        if name in row and dataset.processor is None:
            return f"the file has a column {name}, but the model reads text alone; use data without {name}"
    if info is None:
        return "extra_info is null, and verl reads its index; expected a value, such as {index: 0}, in every row"
    answer = (row.get("reward_model") or {}).get("ground_truth")
    source = row.get(dataset.config.get("reward_fn_key", "data_source"))
    asked = "\n".join(each["content"] for each in prompt if each["role"] != "assistant")
    return gold.row_fault(str(source), asked, answer, info)
