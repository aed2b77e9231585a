"""Record the controller's calls to this worker: the start of each, and the one that is running now.

A worker records its wall clock when a dispatched method starts, after its arguments were fetched. Starts on different
nodes can be compared as exactly as the clocks of the nodes agree (NTP: milliseconds).
"""

from __future__ import annotations

import functools
import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_patches.current import Current
from verl_patches.heartbeat import heartbeat
from verl_patches.layout.phases import VALIDATE

# (method, seconds since the epoch) of this process; bounded, because a trainer may never take them
recent_starts: Current[deque[tuple[str, float]]] = Current(deque(maxlen=4096))
_thread = threading.local()  # `running` while the thread is inside a dispatched method


def take_starts() -> list[tuple[str, float]]:
    """Return and clear (method, seconds since the epoch) of each call since the last take_starts(), in order."""
    taken = list(recent_starts.value)
    recent_starts.value.clear()
    return taken


def record_starts(register: Callable) -> Callable:
    """Wrap verl's `register` so that methods record their start, unless another dispatched method calls them.

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
            return method if direct or inspect.iscoroutinefunction(method) else _record_on_call(method)

        return decorate_recorded

    return with_starts


def _record_on_call(method: Callable) -> Callable:
    @functools.wraps(method)
    def start(*args: Any, **kwargs: Any) -> Any:
        return record_and_call(method, args, kwargs)

    return start


def record_and_call(method: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Record the start of a dispatched method and call it.

    This is a module-level function because Ray pickles worker classes by value, which must not refer to a deque or
    lock.
    """
    if getattr(_thread, "running", False):
        return method(*args, **kwargs)
    cls: Any = type(args[0]) if args else None  # Any: mypy does not accept a class as Hashable
    name = _method_name(method, cls)
    recent_starts.value.append((name, time.time()))
    _thread.running = True
    try:
        with heartbeat.current_heartbeat().in_call(VALIDATE if _is_validation(name, args) else name):
            return method(*args, **kwargs)
    finally:
        _thread.running = False


def _is_validation(name: str, args: Sequence[Any]) -> bool:
    """Return whether verl's _validate makes this call; it marks its prompts (meta_info), a step does not."""
    prompts = args[1] if len(args) > 1 else None
    return name == "generate_sequences" and bool(getattr(prompts, "meta_info", {}).get("validate"))


@functools.cache
def _method_name(method: Callable, cls: type | None) -> str:
    """Return the attribute name of `method`, because verl's own decorators name several methods of a worker `f`."""
    for name in dir(cls) if cls else ():
        attribute = inspect.getattr_static(cls, name)
        while attribute is not None and attribute is not method:
            attribute = getattr(attribute, "__wrapped__", None)
        if attribute is method:
            return name
    return method.__name__
