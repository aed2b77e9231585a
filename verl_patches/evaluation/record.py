"""The files of a run's folder as every command reads them: their kind, size, JSON and values are checked first.

A folder may come from anywhere. Texts are made printable (`verl_patches.values.printable`), numbers are finite or
None, and a file that is not as a run writes it is a ConfigError with its path, what was expected and what was found.
Keys that no command shows are left out; `read_object` gives all of them. metrics.jsonl: evaluation/curves.py.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, FailFast, Field, TypeAdapter, ValidationError
from typing_extensions import Required, TypedDict

from verl_patches.errors import ConfigError
from verl_patches.trainer.record import NOW, delta_of_steps
from verl_patches.values import Natural, printable
from verl_patches.weights.run_folders import chain_of, read_start

SUMMARY, PROGRESS = "summary.json", "progress.log"
MOST_BYTES = 128 << 20  # of a JSON file; a run of 10,000 steps on 256 ranks has about 60 MiB
TAIL_BYTES = 8 << 20  # of progress.log
LONGEST = 4096  # characters of a name and of a line

Size = Annotated[float, Field(ge=-1e100, le=1e100, strict=True)]
Number = Size | None  # JSON has no NaN: None
Line = Annotated[str, Field(max_length=LONGEST, strict=True), AfterValidator(printable)]
Lines = Annotated[str, Field(strict=True), AfterValidator(lambda text: printable(text, keep="\n\t"))]
Numbers = dict[str, Number]  # by names that are looked up, not shown


class Moment(TypedDict):
    """Of a phase's memory (memory/ledger.py)."""

    peak_bytes: Size
    bytes: dict[str, Size]
    measured: dict[str, Size]


class Memory(TypedDict, total=False):
    """Of a step."""

    peak_bytes: Required[Number]
    phases: dict[str, Moment]


class Sync(TypedDict):
    received_bytes: Numbers  # of a step's weight syncs


class Rates(TypedDict, total=False):
    """Of a step (trainer/step_record.py)."""

    tokens_per_s_per_rank: Number
    generated_per_s_per_rank: Number
    tflops_per_s_per_rank: Numbers | None
    mfu: Numbers | None


class Validation(TypedDict):
    """Of verl's metrics (trainer/validation.py)."""

    score: Number
    metrics: dict[Line, Number]


class ValBefore(TypedDict):
    """The validation before the run's first step."""

    step: Natural
    val: Validation


class Step(TypedDict, total=False):
    """One step (trainer/step_record.py)."""

    step: Required[Natural]
    seconds: Required[Numbers]
    reward: Required[Number]
    rewards: Numbers | None  # means of its parts by label
    val: Validation | None
    objective: Numbers | None  # loss, margin, ... on fixed data, which has no reward
    grad_norm: Number
    tokens: Numbers | None
    logprob_delta: Numbers | None
    sync: Sync | None
    memory: Memory | None
    rates: Rates | None
    expert_load: dict[str, Numbers | None] | None
    profile: dict[str, Any] | None
    resumed_after: Natural  # of the first step of a start that goes on


class PatchState(TypedDict, total=False):
    """The state of one row of the catalogue in one process."""

    id: Required[Line]
    state: Required[Line]
    target: Required[Line]
    process: Required[Line]
    reason: Lines


class Summary(TypedDict, total=False):
    """summary.json (trainer/record.py); a run that has no step yet has the launcher's part, or nothing."""

    run: Line | None
    line: Line
    platform: Line
    dtype: Line
    layout: dict[Line, Line]
    ranks: Natural
    versions: dict[Line, Line]
    dirty: dict[Line, list[Line]]
    start: dict[Line, Numbers]
    steps: Annotated[list[Step], FailFast()]
    val_before: ValBefore | None
    logprob_delta: Numbers | None
    patches: Annotated[list[PatchState], FailFast()]
    peak_pss_bytes: Numbers
    exit: Lines


class Doing(TypedDict):
    """now.json: the call that a run is in (Run.show_call of trainer/run.py)."""

    step: Natural
    steps: Natural
    call: Line
    phase: Line
    since: Annotated[float, Field(ge=0, le=1e100, strict=True)]
    step_since: Annotated[float, Field(ge=0, le=1e100, strict=True)]


_SUMMARY, _DOING = TypeAdapter(Summary), TypeAdapter(Doing)


def read_summary(folder: Path) -> dict[str, Any]:
    """Return what summary.json of a start says, with the steps of the starts that it came from before its own.

    Empty before it is there. ConfigError where one of them is not as a run writes it.
    """
    start, own = read_start(folder), _checked(_SUMMARY, folder / SUMMARY)
    links = chain_of(start) if start else []
    if len(links) < 2:
        return own
    steps: list[dict[str, Any]] = []
    val_before = None
    for link in links:
        part = own if link.folder == folder else _checked(_SUMMARY, link.folder / SUMMARY)
        val = part.get("val_before")
        if val and steps and steps[-1]["step"] == val["step"]:
            steps[-1]["val"] = val["val"]
        elif val and link.holds(val["step"]):
            val_before = val_before or val
        steps += [step for step in part.get("steps", ()) if link.holds(step["step"])]
    return {**own, "steps": steps, "val_before": val_before, "logprob_delta": delta_of_steps(steps)}


def read_doing(folder: Path) -> dict[str, Any]:
    """What now.json says; empty before it is there. ConfigError as `read_summary`."""
    return _checked(_DOING, folder / NOW)


def read_object(path: Path) -> dict[str, Any]:
    """All of a JSON object in a run's folder, empty before it is there; NaN and Infinity are None. ConfigError."""
    return _object(_content(path, MOST_BYTES), path)


def _object(content: bytes | None, path: Path) -> dict[str, Any]:
    if content is None:
        return {}
    try:
        found = json.loads(content, parse_constant=lambda name: None)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"is no JSON ({error}), {len(content)} bytes") from None
    if not isinstance(found, dict):
        raise _damaged(path, f"expected a JSON object, found {_short(found)}")
    return found


def last_lines(folder: Path, count: int) -> list[str]:
    """The last lines of progress.log that are for good, of its last TAIL_BYTES; none before it is there."""
    content = _content(folder / PROGRESS, None, TAIL_BYTES)
    lines = [line[2:] for line in (content or b"").decode(errors="replace").split("\n") if line.startswith("| ")]
    return [printable(line[:LONGEST]) for line in lines[-count:]]


def _checked(adapter: TypeAdapter, path: Path) -> dict[str, Any]:
    """The values of `adapter`'s keys. ConfigError names the first one that it does not allow."""
    content = _content(path, MOST_BYTES)
    with suppress(ValidationError):
        return adapter.validate_json(content or b"")  # in one pass; it allows neither NaN nor all that `_object` does
    parsed = _object(content, path)
    if not parsed:
        return {}
    try:
        return adapter.validate_python(parsed)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place, (begin, *rest) = ".".join(map(str, first["loc"])), first["msg"]
        text = f"{printable(place)[:200]}: {begin.lower()}{''.join(rest)}, found {_short(first['input'])}"
        raise _damaged(path, text) from None


def _content(path: Path, most: int | None, tail: int | None = None) -> bytes | None:
    """The bytes of a file, at most its last `tail`; None where there is none. ConfigError for any other kind or size.

    The kind is looked at before the file is opened: a FIFO would wait for a writer.
    """
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            found = f"found {stat.filemode(mode)}, no regular file"
            raise ConfigError(f"{path}: expected a file as a run writes it, {found}; give another run")
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if most is not None and size > most:
                raise _damaged(path, f"expected at most {most} bytes, found {size}")
            file.seek(max(0, size - (size if tail is None else tail)))
            return file.read(most if tail is None else tail)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); expected a file as a run writes it") from None


def _damaged(path: Path, text: str) -> ConfigError:
    return ConfigError(f"{path}: {text}. It is not as a run of this version wrote it: see driver.log beside it")


def _short(value: Any) -> str:
    """A value for a sentence: its type, and a little of a text or a number."""
    if isinstance(value, dict | list):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    return printable(repr(value[:60] if isinstance(value, str) else value))[:80]
