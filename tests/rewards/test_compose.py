"""How the parts of a reward become one number."""

import pytest

from verl_patches.errors import ConfigError
from verl_patches.rewards.compose import compose


@pytest.mark.parametrize(
    ("correct", "well_formed", "score"),
    [(True, True, 1.0), (False, True, 0.1), (False, False, 0.0), (True, False, 0.0)],
)
def test_default_weights(correct, well_formed, score):
    assert compose(correct, well_formed) == score


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5])
def test_a_wrong_answer_never_comes_near_a_right_one(weight):
    assert compose(False, True, weight) == weight <= compose(True, True, weight) / 2


@pytest.mark.parametrize("weight", [-0.1, 0.51, 1.0, float("nan")])
def test_weights_out_of_range_are_refused(weight):
    with pytest.raises(ConfigError, match=r"format_weight must be in 0\.\.0\.5"):
        compose(True, True, weight)
