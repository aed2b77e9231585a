"""Define the errors that users meet, and the checks of a configuration, which become errors where they fail.

Their texts say what is wrong, where, what was expected and found, and what to do next.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_TEMPLATE_NAMES = "<template>", "<unknown>"  # jinja2's file of a chat template: in run-time and in syntax errors
_MODEL_CODE = "/transformers_modules/"  # transformers imports a model folder's own code from copies in this folder
INTERRUPTION_PREFIX = "interrupted by "  # begins the recorded reason of a run that a user or a scheduler ended


class ConfigError(ValueError):
    """Report that a user's input is wrong: a configuration key, an argument, a file or a catalogue row."""


class RecipeError(RuntimeError):
    """Report that a check at run time failed, so that the run cannot go on or its result cannot be trusted.

    patching/engine.py derives PatchError from it, for a row of the catalogue that is not active.
    """


@dataclass(frozen=True)
class Check:
    """Hold the result of one rule: `detail` says what holds, or what was expected and found and what to change.

    With `note` the rule passes with a warning, which is in `detail`.
    """

    name: str
    ok: bool
    detail: str
    note: bool = False


def either(name: str, ok: bool, detail: str, fault: str) -> Check:
    """Return a Check with `detail` if the rule holds, else with `fault` as its detail."""
    return Check(name, ok, detail if ok else fault)


def divides(name: str, total: int, part: int, key: str, quotient: str) -> Check:
    """Return the Check that `part` divides `total`; `key` is what to change, `quotient` what the quotient counts."""
    detail = f"{total} / {part} = {total // part} {quotient}"
    return either(name, total % part == 0, detail, f"{total} is not a multiple of {part}; change {key}")


def require_checks(checks: Iterable[Check]) -> None:
    """Raise ConfigError with every failed check; return if all hold."""
    if failed := [f"{check.name}: {check.detail}" for check in checks if not check.ok]:
        raise ConfigError("Invalid configuration:\n  " + "\n  ".join(failed))


def config_error_text(function: Callable, *arguments: Any) -> str | None:
    """Return the text of the ConfigError that `function` raises; None without one."""
    try:
        function(*arguments)
    except ConfigError as error:
        return str(error)
    return None


def our_command(*words: str) -> str:
    """Return a command of this repository as a user types it: NAME.sh of scripts/, or a subcommand with its words.

    All commands in errors and plans are made here. Words in capitals, such as DIR and CONFIG, stand for a user's own.
    """
    if words[0].endswith(".sh"):
        return shlex.join(["bash", f"scripts/{words[0]}", *words[1:]])
    return shlex.join(["python", "-m", "verl_patches", *words])


def interruption_text(number: int) -> str:
    """Return "interrupted by SIGINT (Ctrl-C)", or the same for another signal."""
    sent = signal.Signals(number)
    cause = {signal.SIGINT: " (Ctrl-C)", signal.SIGHUP: " (its terminal closed)"}.get(sent, "")
    return f"{INTERRUPTION_PREFIX}{sent.name}{cause}"


def traceback_location(text: str, *places: str | None) -> str:
    """Return "FILE:LINE: " of the last line of the user's code in the tracebacks in `text`; empty without one.

    places: the user's files, and folders of models, whose Python files and chat template count.
    """
    found = ""
    for path, line in re.findall(r'File "([^"\n]+)", line (\d+)', text):
        for file in filter(None, (_user_file(path, place) for place in places if place)):
            found = f"{file}:{line}: "
    return found


def locate_error(message: str, text: str, places: Iterable[str]) -> str:
    """Return an error's message after its location in the tracebacks in `text`, unless the message has that already."""
    location = traceback_location(text, *places)
    return message if location in message else location + message


def _user_file(path: str, place: str) -> str | None:
    """Return a traceback's file as the user names it, where it is the file `place` or belongs to the folder `place`."""
    if not os.path.isdir(place):
        return place if path in (place, os.path.abspath(place)) else None
    if path in _TEMPLATE_NAMES:
        file = os.path.join(place, "chat_template.jinja")
        return file if os.path.isfile(file) else f"{os.path.join(place, 'tokenizer_config.json')}, chat_template"
    return path if path.startswith(os.path.join(os.path.abspath(place), "")) or _MODEL_CODE in path else None
