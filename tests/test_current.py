"""A slot's value inside `set` and after errors."""

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
