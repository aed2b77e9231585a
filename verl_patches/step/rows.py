"""Check all rows of a run's data files before workers start, and read those that are left (row data.checked_rows).

A bad row, which would end the run later or could never score, is refused by file and row (counted from 0), or dropped
with recipe.data.skip_bad_rows. Prompts over data.max_prompt_length are left out as data.filter_overlong_prompts says.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from tqdm import tqdm

from verl_patches.errors import ConfigError
from verl_patches.rewards.gold import GoldCheck
from verl_patches.rewards.parts import reward_parts

log = logging.getLogger(__name__)
RowFault = Callable[[dict[str, Any]], str | None]
_BATCH_ROWS = 512
_LOG_INTERVAL_S = 10.0  # seconds between the log's counts of checked rows
_SKIP_KEY = "recipe.data.skip_bad_rows"
_REMEDY = "write them alike, as `data build` does (docs/data.md)"


def check_rl_rows(read: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wrap RLHFDataset._read_files_and_tokenize: check the rows; those of a subclass are for the subclass to check."""

    @functools.wraps(read)
    def checked(self: Any) -> None:
        from verl.utils.dataset.rl_dataset import RLHFDataset  # not at the top: these imports apply our rows
        from verl.workers.reward_manager import NaiveRewardManager

        if type(self) is RLHFDataset:
            root = _root(self.config)
            gold = GoldCheck(reward_parts(root) if root else (), lambda: NaiveRewardManager(None, 0).compute_score)
            skipped = ", ".join(map(str, gold.skipped))
            unchecked = f"whether gold answers can score was not checked for {skipped}" if skipped else ""
            RowCheck(self, _rl_row_fault(self, gold), unchecked=unchecked).read(functools.partial(read, self))
        else:
            read(self)

    return checked


def render(tokenizer: Any, messages: Any) -> str:
    """Return messages as the chat template writes them for an answer, as in verl's RLHFDataset, or raise ValueError."""
    if not isinstance(messages, list) or not messages:
        found = "none" if messages is None else type(messages).__name__
        raise ValueError(f"expected text or a list of messages, found {found}")
    for each in messages:
        for name in ("role", "content"):
            if not isinstance(each, dict) or not isinstance(each.get(name), str):
                found = f"{each.get(name)!r:.60} as {name}" if isinstance(each, dict) else type(each).__name__
                raise ValueError(f"expected role and content, both text, in each message, found {found}")
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template may raise anything
        raise ValueError(f"the chat template failed: {type(error).__name__}: {str(error)[:200]}") from None


class RowCheck:
    """Check the rows of `dataset`, verl's RLHFDataset.

    row_fault: returns what is wrong with a row whose prompt is well formed, or None. columns: those to read; None: all.
    unchecked: what could not be checked, for the report.
    """

    def __init__(self, dataset: Any, row_fault: RowFault, columns: list[str] | None = None, unchecked: str = ""):
        self.dataset, self.config, self.row_fault, self.columns = dataset, dataset.config, row_fault, columns
        self.unchecked = unchecked
        self.files = [str(file) for file in dataset.data_files]
        self.skips = bool(OmegaConf.select(_root(self.config), _SKIP_KEY))
        self.filters = self.config.get("filter_overlong_prompts", True)
        self.rows = self.bad = self.over = self.most_tokens = 0
        self.first_bad = self.longest = ""

    def read(self, read: Callable[[], None]) -> None:
        """Check all rows, then `read` them (verl's method) and keep those that are left.

        The dataset gets `row_report`, a sentence about what was left out or not checked, or "". Raises ConfigError for
        a bad row, for files of different types, and where too few rows for a batch are left.
        """
        _require_same_types(self.files)
        kept = np.array([keeps for file in self.files for keeps in self._check_file(file)], dtype=bool)
        given = self.config.get("train_files")
        trains = given is not None and [*self.dataset.original_data_files] == (
            [given] if isinstance(given, str) else given
        )
        key, least = "data.train_files" if trains else "data.val_files", 1
        if trains:
            least = self.config.get("gen_batch_size") or self.config.train_batch_size
        left, details = f"{key}: {kept.sum()} of {self.rows} rows are used", self._details()
        if kept.sum() < least:
            raise ConfigError(f"{left}; expected at least {least}, a batch" + (f". {details}" if details else ""))
        self.dataset.row_report = f"{left}; {details}" if details else ""
        self.dataset.filter_overlong_prompts = False  # done here
        read()
        if not kept.all():
            self.dataset.dataframe = self.dataset.dataframe.select(np.flatnonzero(kept))

    def _check_file(self, file: str) -> Iterator[bool]:
        """Yield for each row whether it is kept."""
        from pyarrow import parquet

        with parquet.ParquetFile(file) as opened:
            progress = {
                "desc": f"check {file}",
                "unit": "row",
                "mininterval": _LOG_INTERVAL_S,
                "delay": _LOG_INTERVAL_S,
            }
            with tqdm(total=opened.metadata.num_rows, **progress) as bar:
                for batch in opened.iter_batches(_BATCH_ROWS, columns=self.columns):
                    for fault, tokens in self._check_rows(batch.to_pylist()):
                        yield self._keeps(f"{file}, row {bar.n}", fault, tokens)
                        bar.update()

    def _check_rows(self, rows: list[dict[str, Any]]) -> Iterator[tuple[str | None, int]]:
        """Yield (fault or None, tokens of the prompt) of each row."""
        faults, texts, key = list[str | None](), list[str](), self.dataset.prompt_key
        for row in rows:
            text, fault = "", None
            try:
                text = render(self.dataset.tokenizer, row[key]) if key in row else ""
            except ValueError as error:
                fault = f"{key}: {error}"
            texts.append(text)
            faults.append(fault or self.row_fault(row))
        ids = self.dataset.tokenizer(texts, add_special_tokens=False)["input_ids"]
        yield from zip(faults, map(len, ids), strict=True)

    def _keeps(self, place: str, fault: str | None, tokens: int) -> bool:
        """Count a row and return whether it is kept; raise ConfigError for a bad one that is not to be dropped."""
        self.rows += 1
        limit = self.dataset.max_prompt_length
        if fault is None and tokens > limit and not self.filters and self.dataset.truncation == "error":
            fault = (
                f"the prompt has {tokens} tokens; expected at most data.max_prompt_length, {limit}: raise it, or set "
            )
            fault += "data.filter_overlong_prompts=true, which leaves such rows out"
        if fault is not None:
            if not self.skips:
                raise ConfigError(f"{place}: {fault}; {_SKIP_KEY}=true drops such rows")
            self.bad, self.first_bad = self.bad + 1, self.first_bad or f"{place}: {fault}"
            return False
        if tokens > self.most_tokens:
            self.most_tokens, self.longest = tokens, place
        self.over += tokens > limit
        return tokens <= limit or not self.filters

    def _details(self) -> str:
        """Return what was left out, cut or not checked; empty without any of these."""
        parts = [f"bad and dropped: {self.bad}, the first is {self.first_bad}"] if self.bad else []
        if self.over:
            done = "left out" if self.filters else f"cut (data.truncation={self.dataset.truncation})"
            text = f"prompts over data.max_prompt_length, {self.dataset.max_prompt_length}, {done}: {self.over}"
            parts.append(f"{text}, the longest has {self.most_tokens} tokens ({self.longest})")
        return "; ".join([*parts, self.unchecked] if self.unchecked else parts)


def _root(section: Any) -> DictConfig:
    """Return verl's whole configuration, of which `section` is a part; an empty one where it is none."""
    parent = section._get_parent() if isinstance(section, DictConfig) else None
    return parent if isinstance(parent, DictConfig) else OmegaConf.create({})


def _require_same_types(files: list[str]) -> None:
    """Raise ConfigError where verl could not join the files, or would fill extra_info with null."""
    from datasets import Features, Value
    from pyarrow import parquet

    schemas = {file: parquet.read_schema(file) for file in files}
    first = dict[str, tuple[str, Any]]()  # column: the first file that has it, and its type there
    for file, schema in schemas.items():
        for name, kind in Features.from_arrow_schema(schema).items():
            where, known = first.setdefault(name, (file, kind)) if kind != Value("null") else (file, kind)
            if kind != known:
                types = f"{schema.field(name).type}; expected {schemas[where].field(name).type}, as in {where}"
                raise ConfigError(f"{file}: column {name} is {types}: {_REMEDY}")
        if "extra_info" not in schema.names and any("extra_info" in other.names for other in schemas.values()):
            raise ConfigError(f"{file} has no column extra_info, which other files of the run have: {_REMEDY}")


def _rl_row_fault(dataset: Any, gold: GoldCheck) -> RowFault:
    """Return the check of a row of RL: its prompt's end, images, extra_info, and whether its gold answer can score."""
    source_key = dataset.config.get("reward_fn_key", "data_source")

    def fault_of_row(row: dict[str, Any]) -> str | None:
        last = row[dataset.prompt_key][-1]
        if last["role"] == "assistant":
            return f"{dataset.prompt_key} ends with a message of assistant; expected a last message of user or tool"
        for name in (dataset.image_key, dataset.video_key):
            if name in row and dataset.processor is None:
                return f"the file has a column {name}, but the model reads text alone; use data without {name}"
        if "extra_info" in row and row["extra_info"] is None:
            return "extra_info is null, and verl reads its index; expected a value, such as {index: 0}, in every row"
        answer = (row.get("reward_model") or {}).get("ground_truth")
        return gold.row_fault(str(row.get(source_key)), last["content"], answer, row.get("extra_info"))

    return fault_of_row
