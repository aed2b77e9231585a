"""Streams and events of the device: all work is done when a call returns, so nothing ever waits.

This module may be imported while torch is half built, so it does not look at torch.
"""

from __future__ import annotations

import time
from typing import Any

from verl_patches.platform.cpu import torch_cuda


class Event:
    """A point in a stream; all work before it is done when it is made."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False):
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Note the time."""
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to another; RuntimeError where one was not recorded."""
        if self._at_s is None or end_event._at_s is None:
            raise RuntimeError("Event.elapsed_time: both events must have been recorded")
        return (end_event._at_s - self._at_s) * 1000


class Stream(torch_cuda.Stream):
    """A queue whose work is done when a call returns."""

    def record_event(self, event: Event | None = None) -> Event:
        """An event that is over."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All work is done."""
        return True


def stream_of_npu(original: Any) -> type:
    """Row provider for `torch.cuda.Stream`: the NPU's, as transfer_to_npu does."""
    return Stream
