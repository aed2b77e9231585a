"""Check all rows of a run's data files before workers start, and keep those left (patch row data.checked_rows).

A bad row, which would end the run later or could never score, is refused by file and row (counted from 0), or dropped
with recipe.data.skip_bad_rows. Prompts over data.max_prompt_length are left out as data.filter_overlong_prompts says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import itemgetter
from typing import Any

from omegaconf import OmegaConf
from tqdm import tqdm

from verl_patches.errors import ConfigError
from verl_patches.rewards.gold import GoldCheck
from verl_patches.rewards.parts import reward_parts
from verl_patches.step.objectives.chat import parse_calls, parse_functions, parts_left_out, present_fields, render
from verl_patches.step.objectives.settings import TEXT_MESSAGES
from verl_patches.values import loading_errors, value_faults

_BATCH_ROWS = 512
_LOG_INTERVAL_S = 10.0  # seconds between the log's counts of checked rows
_SKIP_KEY = "recipe.data.skip_bad_rows"
Rows = list[dict[str, Any]]


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
        read_checked_rows(self, functools.partial(read, self), functools.partial(_check_rl_rows, self, gold), unchecked)

    return checked


def render_chat(tokenizer: Any, messages: Any) -> str:
    """Return the template's text of messages and generation prompt, as verl's RLHFDataset does, or raise ValueError."""
    if value_faults({"": TEXT_MESSAGES}, {"": messages}):
        found = "null" if messages is None else f"{messages!r:.80}"
        raise ValueError(f"expected text or a list of messages, each with role and content, both text; found {found}")
    return render(tokenizer, messages)


def read_checked_rows(
    dataset: Any,
    read: Callable[[], None],
    check_rows: Callable[[Rows], Iterable[tuple[str | None, int]]],
    unchecked: str = "",
) -> None:
    """Read the files of `dataset`, verl's RLHFDataset, with `read`, verl's method; check all rows, keep what is left.

    check_rows: yields (what is wrong or None, number of the prompt's tokens) of some rows. unchecked: what could not be
    checked, for the report. The dataset gets `row_report`, a sentence about what was left out or not checked, or "".
    Raises ConfigError for files that cannot be read as one, for a bad row, and where less than a batch is left.
    """
    from datasets.exceptions import DatasetGenerationError
    from pyarrow import parquet

    files, config, limit = [str(file) for file in dataset.data_files], dataset.config, dataset.max_prompt_length
    whole = config._get_parent()
    skips = bool(whole and OmegaConf.select(whole, _SKIP_KEY))
    filters, dataset.filter_overlong_prompts = config.get("filter_overlong_prompts", True), False  # done here
    with loading_errors(f"data: expected parquet files with columns of the same types, in {', '.join(files)}"):
        sizes = [parquet.read_metadata(file).num_rows for file in files]
        try:
            read()
        except DatasetGenerationError as error:
            raise error.__cause__ or error from None
    bad, over, kept = list[str](), list[tuple[int, str]](), list[int]()
    places = (f"{file}, row {row}" for file, size in zip(files, sizes, strict=True) for row in range(size))
    batches = dataset.dataframe.with_format("arrow").iter(_BATCH_ROWS)
    bar = {"unit": f"x{_BATCH_ROWS} rows", "mininterval": _LOG_INTERVAL_S, "delay": _LOG_INTERVAL_S}
    shown = tqdm(batches, f"check {files[0]}", **bar)
    found = chain.from_iterable(check_rows(batch.to_pylist()) for batch in shown)
    for number, (place, (fault, tokens)) in enumerate(zip(places, found, strict=True)):
        is_long = fault is None and tokens > limit
        if is_long and not filters and dataset.truncation == "error":
            fault = f"the prompt has {tokens} tokens; expected at most data.max_prompt_length, {limit}: raise it, or "
            fault += "set data.filter_overlong_prompts=true, which leaves such rows out"
        if fault and not skips:
            raise ConfigError(f"{place}: {fault}; {_SKIP_KEY}=true drops such rows")
        if fault:
            bad.append(f"{place}: {fault}")
            continue
        if is_long:
            over.append((tokens, place))
        if not (is_long and filters):
            kept.append(number)
    parts = [f"bad and dropped: {len(bad)}, the first is {bad[0]}"] if bad else []
    if over:
        done = "left out" if filters else f"cut (data.truncation={dataset.truncation})"
        tokens, place = max(over, key=itemgetter(0))
        text = f"prompts over data.max_prompt_length, {limit}, {done}: {len(over)}"
        parts.append(f"{text}, the longest has {tokens} tokens ({place})")
    details = "".join(f"; {part}" for part in (*parts, unchecked) if part)
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    left = f"data: {len(kept)} of {len(dataset.dataframe)} rows of {files[0]}{more} are used"
    trains = dataset.original_data_files in (config.get("train_files"), [config.get("train_files")])
    if len(kept) < (least := config.train_batch_size if trains else 1):
        raise ConfigError(f"{left}; expected at least {least}, a batch{details}")
    dataset.row_report = left + details if details else ""
    if len(kept) < len(dataset.dataframe):
        dataset.dataframe = dataset.dataframe.select(kept)


def _check_rl_rows(dataset: Any, gold: GoldCheck, rows: Rows) -> Iterator[tuple[str | None, int]]:
    """Yield (fault or None, tokens of the prompt) of each row of RL."""
    faults, texts = list[str | None](), list[str]()
    for row in rows:
        text = ""
        try:
            text = render_chat(dataset.tokenizer, row.get(dataset.prompt_key))
            faults.append(_rl_row_fault(dataset, gold, row))
        except ValueError as error:
            faults.append(f"{dataset.prompt_key}: {error}")
        texts.append(text)
    ids = dataset.tokenizer(texts, add_special_tokens=False)["input_ids"]
    yield from zip(faults, map(len, ids), strict=True)


def _rl_row_fault(dataset: Any, gold: GoldCheck, row: dict[str, Any]) -> str | None:
    """Return what is wrong with a row whose prompt is well formed, or None; ValueError for a fault of its messages."""
    prompt, info, reward = row[dataset.prompt_key], row.get("extra_info", {}), row.get("reward_model") or {}
    if prompt[-1]["role"] == "assistant":
        return f"{dataset.prompt_key} ends with a message of assistant; expected a last message of user or tool"
    for name in (dataset.image_key, dataset.video_key):
        if name in row and dataset.processor is None:
            return f"the file has a column {name}, but the model reads text alone; use data without {name}"
    for name, value in (("extra_info", info), ("reward_model", reward)):
        if not isinstance(value, dict):
            example = "{index: 0}" if name == "extra_info" else "{ground_truth: 1}"
            found = "null" if value is None else f"{value!r:.60}"
            return f"{name} is {found}; expected an object, such as {example}, in every row"
    messages = [*map(present_fields, prompt)]
    for one in messages:
        calls = one.get("tool_calls", [])
        if parse_functions(calls, "tool_calls") != calls:
            found = f"tool_calls is {calls!r:.60}, which verl hands to the chat template as it is"
            raise ValueError(f"{found}; expected a list of objects with function, an object with name and arguments")
        parse_calls(calls)  # raises ValueError
    tools = parse_functions(row["tools"], "tools") if row.get("tools") else None
    text = render(dataset.tokenizer, messages, for_answer=False)  # as verl's, which knows no tools
    # the last message is part of the prompt: unlike a response, its content may stand anywhere in the text
    for name in parts_left_out(dataset.tokenizer, messages, tools, text, text):
        return f"the text of {dataset.prompt_key} leaves out or changes {name}; remove it from the rows"
    source = row.get(dataset.config.get("reward_fn_key", "data_source"))
    asked = "\n".join(each["content"] for each in prompt if each["role"] != "assistant")
    return gold.row_fault(str(source), asked, reward.get("ground_truth"), info)
