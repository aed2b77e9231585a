"""A slot's value inside `set`, after errors, and on another thread."""

import threading
from contextvars import ContextVar

import pytest

from verl_patches.current import Current


def test_a_value_is_set_inside_and_the_one_before_it_comes_back():
    slot = Current()
    with slot.set(1) as value, slot.set(2):
        assert (value, slot.value) == (1, 2)
    assert slot.value is None and Current(False).value is False
    slot.value = 3
    with pytest.raises(ZeroDivisionError), slot.set(4):
        1 / 0  # noqa: B018
    assert slot.value == 3


def test_every_thread_sees_it():
    """The control: a ContextVar is empty on a thread that was started inside."""
    slot, variable, seen = Current(), ContextVar("variable", default=None), []
    variable.set(1)
    with slot.set(1):
        thread = threading.Thread(target=lambda: seen.extend((slot.value, variable.get())))
        thread.start()
        thread.join()
    assert seen == [1, None]
