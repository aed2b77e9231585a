"""Seconds that this worker spent per phase inside calls that the trainer sees as one (offload within rollout, ...)."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

_SECONDS: defaultdict[str, float] = defaultdict(float)
_LOCK = threading.Lock()


def timed(phase: str, original: Callable) -> Callable:
    """`original`, its wall seconds added to `phase`. Device work is not waited for: it counts where it is awaited."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return original(*args, **kwargs)
        finally:
            with _LOCK:
                _SECONDS[phase] += time.perf_counter() - start

    return call


def take() -> dict[str, float]:
    """{phase: seconds} since the last take, which starts anew."""
    with _LOCK:
        taken = dict(_SECONDS)
        _SECONDS.clear()
    return taken


def time_offload(original: Callable) -> Callable:
    """Provider: verl's load/offload functions, counted under `offload`."""
    return timed("offload", original)

