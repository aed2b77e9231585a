"""Define `Current`, a slot for a value that one feature keeps for the whole process, in place of a global."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class Current(Generic[T]):
    """Hold a value that all threads share: autograd recomputes layers in its own threads, with empty ContextVars."""

    def __init__(self, value: T):
        self.value = value

    @contextmanager
    def set(self, value: T) -> Iterator[T]:
        """Set `value` inside the block and restore the previous one afterwards, also after an error."""
        before, self.value = self.value, value
        try:
            yield value
        finally:
            self.value = before
