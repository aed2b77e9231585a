"""When each worker starts what the trainer asks of all of them.

A worker notes its wall clock at the start of every dispatched method, arguments fetched; between nodes the clocks must
agree to what is asked of the figure (NTP: milliseconds).
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_starts: deque[tuple[str, float]] = deque(maxlen=4096)  # for a trainer that never takes them
_now = threading.local()


def noted(register: Callable) -> Callable:
    """Row provider for verl's `register`: methods note their start, but not those that a dispatched one calls.

    Left alone: coroutines and DIRECT_ROLLOUT_METHOD, which vLLM's executor calls at every token.
    """

    @functools.wraps(register)
    def with_starts(*args: Any, **kwargs: Any) -> Callable:
        from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

        decorate = register(*args, **kwargs)

        @functools.wraps(decorate)
        def decorate_noted(func: Callable) -> Callable:
            method = decorate(func)
            direct = getattr(method, MAGIC_ATTR)["dispatch_mode"] == Dispatch.DIRECT_ROLLOUT_METHOD
            return method if direct or inspect.iscoroutinefunction(method) else _noting(method)

        return decorate_noted

    return with_starts


def _noting(method: Callable) -> Callable:
    @functools.wraps(method)
    def start(*args: Any, **kwargs: Any) -> Any:
        return note_and_call(method, args, kwargs)

    return start


def note_and_call(method: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A function of this module, so that a worker class which Ray ships by value takes no deque or lock along."""
    if getattr(_now, "running", False):
        return method(*args, **kwargs)
    _starts.append((_name(method, type(args[0]) if args else None), time.time()))
    _now.running = True
    try:
        return method(*args, **kwargs)
    finally:
        _now.running = False


@functools.cache
def _name(method: Callable, cls: type | None) -> str:
    """What `method` is called as: verl's own decorators name several methods of a worker `f`."""
    for name in dir(cls) if cls else ():
        found = inspect.getattr_static(cls, name)
        while found is not None and found is not method:
            found = getattr(found, "__wrapped__", None)
        if found is method:
            return name
    return method.__name__


def take_starts() -> list[tuple[str, float]]:
    """(method, seconds since the epoch) of this process since the last time, in order."""
    found = list(_starts)
    _starts.clear()
    return found


def start_skew(workers: Sequence[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """{method: seconds between its first and its last start in these workers, the most of its calls}.

    The n-th start of a method belongs to the same call in every worker; methods that some workers were not asked as
    often as others are left out.
    """
    by_worker: list[dict[str, list[float]]] = []
    for starts in workers:
        of_method: dict[str, list[float]] = {}
        for method, at in starts:
            of_method.setdefault(method, []).append(at)
        by_worker.append(of_method)
    found = {}
    for method in by_worker[0] if by_worker else ():
        times = [of_method.get(method, []) for of_method in by_worker]
        if len({len(each) for each in times}) == 1:
            found[method] = round(max(max(call) - min(call) for call in zip(*times, strict=True)), 6)
    return found
