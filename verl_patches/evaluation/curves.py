"""Curves of a training, {metric: {step: value}}, from what this recipe and other frameworks leave of it.

read_curves reads a run's folder (metrics.jsonl), TensorBoard's event files, JSON lines and CSV (as wandb exports them,
too), or else a console log:

    verl          `step:1 - critic/score/mean:0.500 - ...`; verl/utils/logger/aggregate_logger.py, concat_dict_to_str
    MindSpeed-RL  `[...] iteration: 1 / 100 | grpo/score/mean : 0.5000 | ...`; mindspeed_rl/utils/loggers.py,
                  handle_msg; Megatron's own lines have the same form
    OpenRLHF      `Global step 1: {'reward': 0.5, ...}`; openrlhf/trainer/ppo_trainer.py

A file is read as a stream; what is kept is bounded by MOST_VALUES.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_patches.data.sources import load
from verl_patches.errors import ConfigError
from verl_patches.values import LARGEST, printable
from verl_patches.weights.run_folders import chain_of, find_start, read_start, starts_in

LOSSES_OF_POLICY = ("actor/pg_loss", "policy_loss", "pg")
FIXED = "objective/loss"  # of a run of ours on fixed data, whose reward has no meaning
# metric -> names that frameworks give it; the first that a source has counts. A prefix train/ is left out
METRICS = {
    "loss": (FIXED, "loss", "gpt_loss", "lm loss", *LOSSES_OF_POLICY),
    "reward": ("critic/score/mean", "grpo/score/mean", "critic/rewards/mean", "grpo/rewards/mean", "reward", "rm"),
    "grad_norm": ("actor/grad_norm", "grad_norm", "grad norm"),
    "length": ("response_length/mean", "response_length", "completions/mean_length", "completion_length", "glen"),
    "entropy": ("actor/entropy", "actor/entropy_loss", "entropy_loss", "entropy"),
    "|dlogp|": ("recipe/logprob_delta_mean",),
}
JUDGED = ("reward", "loss")  # metrics that have a limit (evaluation/compare.py)
RUN = "a run of this recipe"
STEPS = ("training/global_step", "global_step", "step", "iteration", "_step")  # names of a row's step, first one first
MOST_VALUES = 4_000_000  # of all curves of a source
LONGEST_LINE = 16 << 20  # characters
EVENTS = "events.out.tfevents"
_NUMBER = re.compile(r"(?:np\.float\d+\(|tensor\()?(-?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|-?nan|-?inf)\)?", re.IGNORECASE)
_VERL = re.compile(r"(?:^|\s)step:(\d{1,18}) - (.*)")
_MEGATRON = re.compile(r"(?:^|\s)iteration:? *(\d{1,18}) */ *\d+ *\|(.*)")
_OPENRLHF = re.compile(r"Global step (\d{1,18})\b[^:{]{0,40}: \{(.*)\}")
# of a line of each kind: its step and its pairs, then what is between the pairs, and between a name and its value
_LINES = ((_VERL, " - ", ":"), (_MEGATRON, "|", ":"), (_OPENRLHF, ", ", ": "))
Row = tuple[Any, Iterable[tuple[str, Any]]]  # (step, (name, value)s)


@dataclass
class Curves:
    """values: {metric: {step: value}}, also NaN; names: {metric: the source's}."""

    name: str
    kind: str
    values: dict[str, dict[int, float]]
    names: dict[str, str]


def read_curves(
    given: Path, root: Path, metrics: Mapping[str, Iterable[str]] = METRICS, read: Callable[[int], Any] = bool
) -> Curves:
    """The curves of `metrics`, {metric: its possible names}, in a run, a folder or a file; `root`: where runs are.

    read: called with the characters of each line. ConfigError for a source that cannot be read, has none of the
    metrics, or is beyond a limit. Of several values of a step the last counts.
    """
    kind, rows = _source(given, root, read)
    metric_of = {source: metric for metric, sources in metrics.items() for source in sources}
    found: dict[str, dict[int, float]] = {}
    seen: dict[str, None] = {}  # other names, for an error
    count = 0
    for number, (step, pairs) in enumerate(rows, 1):
        for source, text in pairs:
            name, value = source.strip().removeprefix("train/"), _number(text)
            if value is not None and name in metric_of:
                at, curve = _step(number if step is None else step, given), found.setdefault(name, {})
                count += at not in curve
                curve[at] = value
            elif value is not None and len(seen) < 9 and name.lower() not in STEPS:
                seen[printable(name[:80])] = None
        if count > MOST_VALUES:
            raise ConfigError(f"{given}: expected at most {MOST_VALUES:,} values; give fewer with --metric")
    names = {metric: first for metric, sources in metrics.items() if (first := next(filter(found.get, sources), None))}
    if names.get("loss") == FIXED:
        names.pop("reward", None)
    if not names:
        raise ConfigError(
            f"{given}, read as {kind}: expected one of {', '.join(metrics)} by a name of docs/compare.md, found "
            f"{', '.join(seen) or 'no numbers by step'}; give another file, or its names with --metric"
        )
    values = {metric: found[name] for metric, name in names.items()}
    if kind == RUN:  # metrics.jsonl leaves out what is not finite
        steps = set().union(*values.values())
        values |= {metric: dict.fromkeys(steps, math.nan) | values[metric] for metric in JUDGED if metric in values}
    return Curves(str(given), kind, values, names)


def _source(given: Path, root: Path, read: Callable[[int], Any]) -> tuple[str, Iterable[Row]]:
    """(what it is read as, its rows)."""
    with load(f"{given}: expected a run or a file that can be read"):
        is_folder, is_there = given.is_dir(), given.exists()
        events = sorted([*given.glob(f"{EVENTS}*"), *given.glob(f"*/{EVENTS}*")]) if is_folder else []
    is_run = is_folder and bool(read_start(given) or starts_in(given))
    if events and not is_run:
        if len(folders := sorted({str(path.parent) for path in events})) > 1:
            raise ConfigError(f"{given} has the events of several runs: give one of {', '.join(folders[:9])}")
        return "TensorBoard", itertools.chain.from_iterable(map(_events, events))
    if not is_there or is_folder:
        return RUN, _of_run(find_start(given, root, ", or a log file"), read)
    if given.name.startswith(EVENTS):
        return "TensorBoard", _events(given)
    kinds = {".csv": ("CSV", _csv), ".jsonl": ("JSON lines", _jsonl), ".json": ("JSON lines", _jsonl)}
    kind, rows_of = kinds.get(given.suffix.lower(), ("a console log", _log))
    return kind, rows_of(given, read)


def _number(value: Any) -> float | None:
    """A number, also one that is written as text (JSON has no NaN); None for anything else."""
    try:
        return float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def _step(value: Any, given: Path) -> int:
    number = _number(value)
    if number is None or not 0 <= number <= LARGEST or number != int(number):
        raise ConfigError(f"{given}: a step is {printable(repr(value)[:40])}; expected a whole number from 0")
    return int(number)


def _mapping(row: Any, path: Path) -> Row:
    """A row of JSON or CSV: its step is the first of STEPS that it has."""
    if not isinstance(row, dict):
        found = type(row).__name__
        raise ConfigError(f"{path}: expected JSON lines, each an object, found {found}; give another file")
    plain = {key.strip().lower().removeprefix("train/"): value for key, value in row.items()}
    return next((plain[key] for key in STEPS if plain.get(key) not in (None, "")), None), row.items()


# ---- files


def _lines(path: Path, read: Callable[[int], Any]) -> Iterator[str]:
    """The lines of a plain file, which end with \\n, \\r or both; ConfigError for one above LONGEST_LINE."""
    with load(f"{path}: expected a file that can be read"):
        if not stat.S_ISREG(mode := path.stat().st_mode):  # a FIFO would wait for a writer
            raise ConfigError(f"{path}: expected a file, found {stat.filemode(mode)}; give another")
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            for number in itertools.count(1):
                line = file.readline(LONGEST_LINE + 1)
                if not line:
                    return
                if len(line) > LONGEST_LINE:
                    text = f"expected at most {LONGEST_LINE:,} characters, found more; give another file"
                    raise ConfigError(f"{path}, line {number}: {text}")
                read(len(line))
                yield line


def _jsonl(path: Path, read: Callable[[int], Any]) -> Iterator[Row]:
    for number, line in enumerate(_lines(path, read), 1):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            if not line.endswith("\n"):
                return  # it is being written
            raise ConfigError(
                f"{path}, line {number}: is no JSON ({type(error).__name__}); give another file"
            ) from None
        yield _mapping(row, path)


def _of_run(folder: Path, read: Callable[[int], Any]) -> Iterator[Row]:
    """The rows of metrics.jsonl of a start and of those that it came from; one without a step may have no file."""
    files = {link.folder / "metrics.jsonl": link for link in chain_of(read_start(folder))}
    for path in [path for path in files if path.exists()] or [*files][-1:]:
        for step, pairs in _jsonl(path, read):
            number = _number(step)
            if number is None or files[path].holds(number):
                yield step, pairs


def _csv(path: Path, read: Callable[[int], Any]) -> Iterator[Row]:
    """Rows below a line of names; those of a panel of wandb, "run - metric", become the metric's."""
    with load(f"{path}: expected CSV"):
        rows = csv.reader(_lines(path, read))
        names = [name.rpartition(" - ")[2] for name in next(rows, [])]
        if len({*names}) < len(names):
            raise ConfigError(f"{path} has several columns of one name: export one run alone")
        for row in rows:
            yield _mapping(dict(zip(names, row, strict=False)), path)


def _events(path: Path) -> Iterator[Row]:
    """Scalars of one of TensorBoard's event files; it ends where the file is cut or damaged."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    if not path.is_file():
        raise ConfigError(f"{path}: expected a file of events, found none; give another folder")
    with load(f"{path}: expected TensorBoard's events; give another file"):
        for event in EventFileLoader(os.fspath(path)).Load():
            scalars = (value for value in event.summary.value if value.metadata.plugin_data.plugin_name == "scalars")
            for value in scalars:
                if math.prod(size.size for size in value.tensor.tensor_shape.dim) == 1:  # make_ndarray allocates it
                    yield event.step, [(value.tag, float(make_ndarray(value.tensor).item()))]


def _log(path: Path, read: Callable[[int], Any]) -> Iterator[Row]:
    """Lines of a console log."""
    for line in _lines(path, read):
        for pattern, between, sign in _LINES:
            if match := pattern.search(line):
                yield int(match[1]), _pairs(match[2], between, sign)
                break


def _pairs(text: str, between: str, sign: str) -> list[tuple[str, str]]:
    """(name, number as text) of the parts of a line whose value is a number."""
    parts = (part.rpartition(sign) for part in text.split(between))
    found = ((name.strip(" '\""), _NUMBER.fullmatch(value.strip())) for name, _, value in parts)
    return [(name, match[1]) for name, match in found if name and match]
