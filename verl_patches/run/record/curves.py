"""Read curves of a training, {metric: {step: value}}, from the files of this recipe and of other frameworks.

read_curves reads a run's folder (metrics.jsonl), TensorBoard's event files, JSON lines and CSV (as wandb exports them,
too), or else a console log:

    verl          `step:1 - critic/score/mean:0.500 - ...`; verl/utils/logger/aggregate_logger.py, concat_dict_to_str
    MindSpeed-RL  `[...] iteration: 1 / 100 | grpo/score/mean : 0.5000 | ...`; mindspeed_rl/utils/loggers.py,
                  handle_msg; Megatron's own lines have the same form
    OpenRLHF      `Global step 1: {'reward': 0.5, ...}`; openrlhf/trainer/ppo_trainer.py

A value that is not a number is an error; a row may lack a value.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_patches.errors import ConfigError
from verl_patches.values import loading_errors
from verl_patches.weights.run_folders import find_start, list_starts, read_start, require_start, start_chain

LOSSES_OF_POLICY = ("actor/pg_loss", "policy_loss", "pg")
FIXED_DATA_LOSS = "objective/loss"  # the loss of our runs on fixed data, whose reward has no meaning
# metric -> its names in frameworks; the first that a source has counts. A prefix train/ is left out
METRICS = {
    "loss": (FIXED_DATA_LOSS, "loss", "gpt_loss", "lm loss", *LOSSES_OF_POLICY),
    "reward": ("critic/score/mean", "grpo/score/mean", "critic/rewards/mean", "grpo/rewards/mean", "reward", "rm"),
    "grad_norm": ("actor/grad_norm", "grad_norm", "grad norm"),
    "length": ("response_length/mean", "response_length", "completions/mean_length", "completion_length", "glen"),
    "entropy": ("actor/entropy", "actor/entropy_loss", "entropy_loss", "entropy"),
    "|dlogp|": ("recipe/logprob_delta_mean",),
}
JUDGED_METRICS = ("reward", "loss")  # metrics that have a limit (run/record/compare.py)
RUN_KIND = "a run of this recipe"
# names of a row's step, by precedence
STEP_NAMES = ("training/global_step", "global_step", "step", "iteration", "_step")
EVENTS_PREFIX = "events.out.tfevents"
_NUMBER = re.compile(r"(?:np\.float\d+\(|tensor\()?(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|-?nan|-?inf)\)?", re.IGNORECASE)
_VERL = re.compile(r"(?:^|\s)step:(\d{1,18}) - (.*)")
_MEGATRON = re.compile(r"(?:^|\s)iteration:? *(\d{1,18}) */ *\d+ *\|(.*)")
_OPENRLHF = re.compile(r"Global step (\d{1,18})\b[^:{]{0,40}: \{(.*)\}")
# how a line of each kind gives its step and its pairs, then the text between pairs, and between a name and its value
_LINE_FORMS = ((_VERL, " - ", ":"), (_MEGATRON, "|", ":"), (_OPENRLHF, ", ", ": "))
Row = tuple[Any, Iterable[tuple[str, Any]]]  # (step, (name, value)s)


@dataclass
class Curves:
    """Hold values, {metric: {step: value}} with NaN where it was recorded, and names, {metric: the source's name}."""

    name: str
    kind: str
    values: dict[str, dict[int, float]]
    names: dict[str, str]


def read_curves(given: Path, root: Path, metrics: Mapping[str, Iterable[str]] = METRICS) -> Curves:
    """Return the curves of `metrics`, {metric: its possible names}, in a run, a folder or a file.

    root: the folder of all runs. Raise ConfigError for a source that cannot be read, has none of the metrics, or has a
    text in one of them. Of several values of a step the last counts.
    """
    found: dict[str, dict[Any, Any]] = {}  # name -> {step: value}, as in the source
    with loading_errors(f"{given}: expected a run or a file that can be read"):
        kind, rows = _read_source(given, root)
        for number, (step, pairs) in enumerate(rows, 1):
            for name, value in pairs:
                if value not in (None, ""):
                    found.setdefault(name.strip().removeprefix("train/"), {})[number if step is None else step] = value
    first = {metric: next(filter(found.get, sources), None) for metric, sources in metrics.items()}
    names = {metric: name for metric, name in first.items() if name}
    if names.get("loss") == FIXED_DATA_LOSS:
        names.pop("reward", None)
    if not names:
        other = [name for name in found if name.lower() not in STEP_NAMES][:9]
        raise ConfigError(
            f"{given}, read as {kind}: expected one of {', '.join(metrics)} under a name of docs/use.md, found "
            f"{', '.join(other) or 'no numbers by step'}; give another file, or name its metric with --metric"
        )
    values = {metric: _numbers(found[name], f"{given}: {name}") for metric, name in names.items()}
    if kind == RUN_KIND:  # metrics.jsonl omits values that are not finite
        steps = set().union(*values.values())
        for metric in values.keys() & {*JUDGED_METRICS}:
            values[metric] = dict.fromkeys(steps, math.nan) | values[metric]
    return Curves(str(given), kind, values, names)


def _numbers(column: Mapping[Any, Any], place: str) -> dict[int, float]:
    """Return {step: value} of texts or numbers; ConfigError for other values, and for a step that is not whole."""
    numbers = {}
    for step, value in column.items():
        try:
            if not float(step).is_integer():
                raise ValueError
            numbers[int(float(step))] = float(value)
        except (TypeError, ValueError, OverflowError):
            text = f"{value!r:.40} at step {step!r:.40}; expected numbers at whole steps"
            raise ConfigError(f"{place} is {text}") from None
    return numbers


def _read_source(given: Path, root: Path) -> tuple[str, Iterable[Row]]:
    """Return the kind of a source, which says how it is read, and its rows."""
    if given.is_dir() and not (read_start(given) or list_starts(given)):
        events = sorted([*given.glob(f"{EVENTS_PREFIX}*"), *given.glob(f"*/{EVENTS_PREFIX}*")])
        if len(folders := sorted({str(path.parent) for path in events})) > 1:
            raise ConfigError(f"{given} has the events of several runs: give one of {', '.join(folders[:9])}")
        if events:
            return "TensorBoard", itertools.chain.from_iterable(map(_event_rows, events))
    if not given.is_file():
        return RUN_KIND, _run_rows(find_start(given, root, ", or a log file"))
    if given.name.startswith(EVENTS_PREFIX):
        return "TensorBoard", _event_rows(given)
    kinds = {".csv": ("CSV", _csv_rows), ".jsonl": ("JSON lines", _jsonl_rows), ".json": ("JSON lines", _jsonl_rows)}
    kind, read_rows = kinds.get(given.suffix.lower(), ("a console log", _log_rows))
    return kind, read_rows(given)


def _parse_row(values: Mapping[str, Any]) -> Row:
    """Return a row of JSON or CSV with its step, under the first of STEP_NAMES that it has."""
    plain = {key.strip().lower().removeprefix("train/"): value for key, value in values.items()}
    return next((plain[key] for key in STEP_NAMES if plain.get(key) not in (None, "")), None), values.items()


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                yield _parse_row(json.loads(line) if line.strip() else {})
            except (ValueError, AttributeError) as error:
                if not line.endswith("\n"):
                    return  # the line is being written
                raise ConfigError(f"{path}, line {number}: expected a JSON object, found {error}") from None


def _run_rows(folder: Path) -> Iterator[Row]:
    """Yield the rows of metrics.jsonl of a start and of the starts that it resumes; rows without a step too."""
    files = {link.folder / "metrics.jsonl": link for link in start_chain(require_start(folder))}
    for path in [path for path in files if path.exists()] or [*files][-1:]:
        yield from (row for row in _jsonl_rows(path) if row[0] is None or files[path].holds(row[0]))


def _csv_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a CSV below its line of names; wandb's "run - metric" becomes the metric's name."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = csv.reader(file)
        names = [name.rpartition(" - ")[2] for name in next(rows, [])]
        if len({*names}) < len(names):
            raise ConfigError(f"{path} has several columns of one name: export one run alone")
        yield from (_parse_row(dict(zip(names, row, strict=False))) for row in rows)


def _event_rows(path: Path) -> Iterator[Row]:
    """Yield the scalars of one of TensorBoard's event files, up to the record at which the file is cut off."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    for event in EventFileLoader(str(path)).Load():
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                yield event.step, [(value.tag, make_ndarray(value.tensor).item())]


def _log_rows(path: Path) -> Iterator[Row]:
    """Yield the lines of a console log that have a step."""
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            for pattern, between, sign in _LINE_FORMS:
                if match := pattern.search(line):
                    yield int(match[1]), _pairs(match[2], between, sign)
                    break


def _pairs(text: str, between: str, sign: str) -> list[tuple[str, str]]:
    """Return (name, number as text) of the parts of a line whose value is a number."""
    parts = (part.rpartition(sign) for part in text.split(between))
    found = ((name.strip(" '\""), _NUMBER.fullmatch(value.strip())) for name, _, value in parts)
    return [(name, match[1]) for name, match in found if name and match]
