import pytest

from verl_patches.errors import ConfigError
from verl_patches.rewards import learnable
from verl_patches.rewards.by_source import compute_score


def test_each_row_is_paid_by_its_own_reward():
    letters = compute_score(learnable.DATA_SOURCE, "abcdefgh" + "A" * 8, "small")
    assert letters == {"score": 0.5, "acc": 0.0, "format": 1.0}
    assert compute_score(learnable.DATA_SOURCE, "a" * 16, "small")["acc"] == 1.0
    right, wrong = (compute_score("deepscaler", rf"so \boxed{{{x}}}", "42") for x in (42, 43))
    assert right["score"] == 1.0 and wrong["score"] < 0.5
    assert set(letters) == set(right)


def test_errors_of_the_own_reward_come_through():
    with pytest.raises(ConfigError, match="expected one of"):
        compute_score(learnable.DATA_SOURCE, "x", "42")
