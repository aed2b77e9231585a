"""Record which of the controller's calls this worker is running now."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_patches.heartbeat import heartbeat
from verl_patches.layout.phases import VALIDATE

_thread = threading.local()  # `running` while the thread is inside a dispatched method


def record_calls(register: Callable) -> Callable:
    """Wrap verl's `register` so that methods mark the heartbeat, unless another dispatched method calls them.

    Not recorded: coroutines and DIRECT_ROLLOUT_METHOD, which vLLM's executor calls at every token.
    """

    @functools.wraps(register)
    def with_marks(*args: Any, **kwargs: Any) -> Callable:
        from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch

        decorate = register(*args, **kwargs)

        @functools.wraps(decorate)
        def decorate_recorded(func: Callable) -> Callable:
            method = decorate(func)
            direct = getattr(method, MAGIC_ATTR)["dispatch_mode"] == Dispatch.DIRECT_ROLLOUT_METHOD
            return method if direct or inspect.iscoroutinefunction(method) else _record_on_call(method)

        return decorate_recorded

    return with_marks


def _record_on_call(method: Callable) -> Callable:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return record_and_call(method, args, kwargs)

    return call


def record_and_call(method: Callable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a dispatched method, which the heartbeat shows meanwhile.

    This is a module-level function because Ray pickles worker classes by value, which must not refer to a thread's
    state.
    """
    if getattr(_thread, "running", False):
        return method(*args, **kwargs)
    cls: Any = type(args[0]) if args else None  # Any: mypy does not accept a class as Hashable
    name = _method_name(method, cls)
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
