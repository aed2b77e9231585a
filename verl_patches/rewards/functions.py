"""Load a reward function of a Python file, call it as verl does, and read the score from its result.

No torch: a helper process with a time limit runs this file too.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
import numbers
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_RESULTS = "a finite number, a dict or a dataclass with `score`, or (score, dict), for one response"


class ResultError(Exception):
    """Report that a reward function cannot be called as verl does, or gives no score; the message has file and line."""


def score_response(path: str, name: str, kwargs: Mapping[str, Any], keywords: Mapping[str, Any] | None = None) -> Any:
    """Return (score, other values) that function `name` of the file gives for verl's keywords of one response.

    Without keywords the function is only loaded; the result is then True, which a HelperProcess expects of its trial.
    """
    function, where = _load_function(path, name)
    if keywords is None:
        return True
    _require_keywords(path, name, (*keywords, *kwargs))
    return read_result(function(**keywords, **kwargs), where)


@functools.cache
def _require_keywords(path: str, name: str, keywords: tuple[str, ...]) -> None:
    """Raise ResultError where a function does not take these keywords; a process checks it once."""
    function, where = _load_function(path, name)
    try:
        inspect.signature(function).bind(**dict.fromkeys(keywords))
    except TypeError as error:
        expected = f"{name}({', '.join(keywords)})"
        raise ResultError(f"{where}: {error}; expected {expected}, called once for each response") from None
    except ValueError:
        pass  # a compiled function need not have a signature


@functools.cache
def _load_function(path: str, name: str) -> tuple[Callable, str]:
    """Return a function and "FILE:LINE: NAME"; a process loads it once, so that training and validation share it."""
    spec = importlib.util.spec_from_file_location(f"reward_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ResultError(f"{path}: expected a file whose name ends with .py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise ResultError(f"{path} does not define {name}; set `function` of the entry to the name of a function")
    code = getattr(inspect.unwrap(function), "__code__", None)
    return function, f"{code.co_filename}:{code.co_firstlineno}: {name}" if code else f"{path}: {name}"


def read_result(result: Any, where: str) -> tuple[float, dict[str, Any]]:
    """Return (score, other values) of what a reward function returned; `where` names it in a ResultError."""
    if inspect.iscoroutine(result):
        result.close()  # without a warning that nothing awaited it
        raise ResultError(
            f"{where} is async, and nothing awaits its result; expected a function that calls asyncio.run"
        )
    score, values = result, {}
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    if isinstance(result, Mapping):
        score, values = result.get("score"), dict(result)
    elif isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
        score, values = result[0], dict(result[1])
    values.pop("score", None)
    number = _plain_value(score)
    if not isinstance(number, numbers.Real) or not math.isfinite(number):
        raise ResultError(f"{where} returned {result!r:.200}; expected {_RESULTS}")
    return float(number), {str(name): _plain_value(value) for name, value in values.items()}


def _plain_value(value: Any) -> Any:
    """Return the Python value of a number of numpy, or of a tensor without dimensions; any other value unchanged."""
    return value.item() if getattr(value, "shape", None) == () else value


class _LimitReached(BaseException):
    """End a block at its time limit; a user's `except Exception` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError at the line that the block has reached after `seconds`; main thread only.

    The signal is not SIGALRM, which reward functions use themselves.
    """

    def end(*_: Any) -> None:
        raise _LimitReached

    before = signal.signal(signal.SIGUSR1, end)
    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGUSR1])  # the main thread gets it
    timer.start()
    try:
        yield
    except _LimitReached as error:
        text = f"no result after {seconds:g} s; set timeout_s of the entry to the seconds that it needs"
        raise TimeoutError(text) from error
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGUSR1, before)
