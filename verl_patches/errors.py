"""The errors that users meet, and the rules of a configuration, which are errors where they fail.

Their texts say what, where, expected, found, and what to do next.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INTERRUPTED = "interrupted by "  # how the reason of a run begins that a user or a scheduler ended


class ConfigError(ValueError):
    """Something that a user gave is wrong: a configuration key, an argument, a file or a catalogue row."""


class RecipeError(RuntimeError):
    """The run cannot go on, or its result could not be trusted: a check of this package failed at run time.

    patching/engine.py derives PatchError from it: a row of the catalogue could not be made active, or is no longer.
    """


@dataclass(frozen=True)
class Check:
    """One rule: `detail` says what holds, or what was expected, what was found and what to change.

    `note`: the rule passes with a warning, which `detail` has.
    """

    name: str
    ok: bool
    detail: str
    note: bool = False


def either(name: str, ok: bool, held: str, fault: str) -> Check:
    """The Check whose detail is `held` where the rule holds, else `fault`."""
    return Check(name, ok, held if ok else fault)


def divides(name: str, total: int, part: int, key: str, quotient: str) -> Check:
    """Whether `part` divides `total`; `key`: what to change, `quotient`: what the quotient counts."""
    held = f"{total} / {part} = {total // part} {quotient}"
    return either(name, total % part == 0, held, f"{total} is not a multiple of {part}; change {key}")


def require(checks: Iterable[Check]) -> None:
    """ConfigError that lists every failed check; nothing if all hold."""
    if failed := [f"{check.name}: {check.detail}" for check in checks if not check.ok]:
        raise ConfigError("Invalid configuration:\n  " + "\n  ".join(failed))


def fault_of(function: Callable, *arguments: Any) -> str | None:
    """The text of the ConfigError that `function` raises; None without one."""
    try:
        function(*arguments)
    except ConfigError as error:
        return str(error)
    return None


def interrupted(number: int) -> str:
    """ "interrupted by SIGINT (Ctrl-C)", or by another signal."""
    sent = signal.Signals(number)
    cause = {signal.SIGINT: " (Ctrl-C)", signal.SIGHUP: " (its terminal closed)"}.get(sent, "")
    return f"{INTERRUPTED}{sent.name}{cause}"


def place_in(text: str, file: str | None) -> str:
    """ "FILE:LINE: ", the last line of `file` that the tracebacks in `text` name; empty without one."""
    lines = [line for path, line in re.findall(r'File "([^"\n]+)", line (\d+)', text) if file and _is(path, file)]
    return f"{file}:{lines[-1]}: " if lines else ""


def _is(path: str, file: str) -> bool:
    """Whether a traceback's path is that of `file`, which may be relative to the folder of another process."""
    return path == os.path.abspath(file) or Path(path).parts[-len(Path(file).parts) :] == Path(file).parts
