"""A value that one feature keeps for the whole process: a slot beside the feature's code, in place of a global."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Current(Generic[T]):
    """`value` is the same on every thread: autograd recomputes layers on its own, where a ContextVar would be empty."""

    def __init__(self, value: T):
        self.value = value

    @contextmanager
    def set(self, value: T) -> Iterator[T]:
        """`value` inside, the one before it afterwards, after an error too."""
        before, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = before
