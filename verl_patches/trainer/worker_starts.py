"""Start times of dispatched methods in each worker, for the start skew between workers.

A worker records its wall clock when a dispatched method starts, after its arguments have been fetched. Between nodes
the skew is as exact as their clocks (NTP: milliseconds).
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_patches.watch import heartbeat
from verl_patches.watch.bounds import VALIDATE

_starts: deque[tuple[str, float]] = deque(maxlen=4096)  # bounded, as a trainer may never call take_starts
_now = threading.local()


def record_starts(register: Callable) -> Callable:
    """Row provider for verl's `register`: methods record their start, unless another dispatched method calls them.

    Not recorded: coroutines and DIRECT_ROLLOUT_METHOD, which vLLM's executor calls at every token.
    """

    @functools.wraps(register)
    def with_starts(*args: Any, **kwargs: Any) -> Callable:
        from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

        decorate = register(*args, **kwargs)

        @functools.wraps(decorate)
        def decorate_recorded(func: Callable) -> Callable:
            method = decorate(func)
            direct = getattr(method, MAGIC_ATTR)["dispatch_mode"] == Dispatch.DIRECT_ROLLOUT_METHOD
            return method if direct or inspect.iscoroutinefunction(method) else _recording(method)

        return decorate_recorded

    return with_starts


def _recording(method: Callable) -> Callable:
    @functools.wraps(method)
    def start(*args: Any, **kwargs: Any) -> Any:
        return record_and_call(method, args, kwargs)

    return start


def record_and_call(method: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A module-level function, so that a worker class that Ray pickles by value refers to no deque or lock."""
    if getattr(_now, "running", False):
        return method(*args, **kwargs)
    name = _name(method, type(args[0]) if args else None)
    _starts.append((name, time.time()))
    _now.running = True
    try:
        with heartbeat.in_call(VALIDATE if _validates(name, args) else name):
            return method(*args, **kwargs)
    finally:
        _now.running = False


def _validates(name: str, args: Sequence[Any]) -> bool:
    """Whether this is a call of verl's _validate, which marks its prompts: other prompts, and more of them."""
    prompts = args[1] if len(args) > 1 else None
    return name == "generate_sequences" and bool(getattr(prompts, "meta_info", {}).get("validate"))


@functools.cache
def _name(method: Callable, cls: type | None) -> str:
    """The attribute name of `method`: verl's own decorators name several methods of a worker `f`."""
    for name in dir(cls) if cls else ():
        found = inspect.getattr_static(cls, name)
        while found is not None and found is not method:
            found = getattr(found, "__wrapped__", None)
        if found is method:
            return name
    return method.__name__


def take_starts() -> list[tuple[str, float]]:
    """(method, seconds since the epoch) of this process since the last take_starts(), in order."""
    found = list(_starts)
    _starts.clear()
    return found


def start_skew(workers: Sequence[Sequence[tuple[str, float]]]) -> dict[str, float]:
    """{method: seconds between its first and its last start in these workers, maximum over its calls}.

    The n-th start of a method belongs to the same call in every worker; methods with unequal counts are left out.
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
