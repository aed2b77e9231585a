"""Test the entries of recipe.rewards: refusals, a configuration's parts, the closed form of the length penalty."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.recipe import Reward
from verl_patches.rewards.parts import length_penalty
from verl_patches.rules import RULES

TINY = "deepseekv3_tiny_cpu"
MODEL = "recipe.rewards=[{name: reward_model, path: elsewhere}]"
CHECKS = {"rewards", "line pypi", "objective", "filter groups"}
CHECKS |= {"reward models", "reward model micro batch", "actor = reward model"}
SHORT = ["recipe.rewards=null", "custom_reward_function.path=a.py", "custom_reward_function.name=score"]


def rewards(text, *overrides):
    return composed(TINY, [f"recipe.rewards=[{text}]", *overrides])


def faults(run):
    return [check.detail for check in RULES.checks(run) if check.name in CHECKS and not check.ok]


@given(st.integers(1, 4096), st.data())
def test_the_penalty_is_zero_up_to_the_buffer_then_linear_and_minus_one_at_full_length(longest, data):
    """Check arXiv:2503.14476, eq. 13."""
    buffer = data.draw(st.integers(1, longest))
    assert length_penalty(longest, longest, buffer) == -1.0 and length_penalty(longest + 1, longest, buffer) == -1.0
    assert length_penalty(longest - buffer, longest, buffer) == length_penalty(0, longest, buffer) == 0.0
    tokens = data.draw(st.integers(longest - buffer, longest))
    assert length_penalty(tokens, longest, buffer) == pytest.approx((longest - buffer - tokens) / buffer)


def test_the_default_buffer_is_that_of_dapo():
    assert Reward("length").penalty_tokens(20_480) == 4_096
    assert Reward("length", buffer_tokens=7).penalty_tokens(20_480) == 7
    assert Reward("length").penalty_tokens(3) == 1


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{name: mats}", r"rewards\[0\].name is 'mats'; expected one of maths, "),
        ("{name: maths},{name: maths, format_weigth: 0}", r"rewards\[1\]: unknown key format_weigth; did you mean for"),
        ("{name: python}", r"rewards\[0\].path is missing"),
        ("{name: maths, weight: many, format_weight: 0.6}", r"weight is 'many'; [^\n]*\n.*format_weight is 0.6"),
    ],
)
def test_an_entry_that_is_not_of_its_kind_is_refused(entry, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        rewards(entry)


def test_the_short_form_is_one_python_entry_and_both_are_refused():
    (short,) = composed(TINY, [*SHORT, "+custom_reward_function.reward_kwargs.x=1"]).rewards
    (entry,) = rewards("{name: python, path: a.py, function: score, kwargs: {x: 1}}").rewards
    assert short.entry == entry.entry and (short.label, entry.label) == ("python", "python")
    assert (short.where, entry.where) == ("custom_reward_function", "recipe.rewards[0]")
    with pytest.raises(ConfigError, match="both given.*recipe.rewards=null"):
        composed(TINY, SHORT[1:])
    assert [part.entry for part in composed(TINY, SHORT[:1]).rewards] == [Reward("data_source")]


def test_two_entries_of_one_name_have_labels_of_their_own():
    run = rewards("{name: python, path: a.py},{name: maths, weight: 0.5},{name: python, path: b.py}")
    expected = [("python_0", 1.0), ("maths", 0.5), ("python_2", 1.0)]
    assert [(part.label, part.entry.weight) for part in run.rewards] == expected
    assert faults(run) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["recipe.rewards=[]"], "recipe.rewards is empty"),
        (["recipe.rewards=[{name: length, buffer_tokens: 17}]"], "is 17; expected <= data.max_response_length, 16"),
        (["reward_model.enable=true"], "enable is true.* recipe.rewards=.{name: reward_model, path: FOLDER}"),
        ([MODEL, "reward_model.megatron.param_offload=false"], "reward_model.megatron.param_offload is False"),
        ([MODEL, "reward_model.megatron.tensor_model_parallel_size=2"], "actor and reward model to share one layout"),
        ([MODEL, "reward_model.micro_batch_size_per_gpu=3"], "not a multiple of 3"),
        ([MODEL, "recipe.patches=[-reward.models]"], "row reward.models or .* is off"),
        ([MODEL, "trainer.test_freq=1"], "reward models do not run in validation"),
        ([MODEL, "algorithm.adv_estimator=remax"], "baseline runs no reward model"),
        ([MODEL, "recipe.filter_groups.metric=score"], "recipe.rewards has a reward model: no memory"),
        (["algo=sft", MODEL], "recipe.rewards is .*fixed responses have no reward"),
        (["recipe.patches=[-reward.parts]"], "row reward.parts is off"),
        (["reward_model.reward_manager=dapo"], "reward_manager is dapo.*an entry of name length"),
        (["reward_model.reward_manager=prime"], "scores an error and a timeout as 0"),
        (["+reward_model.reward_kwargs.max_resp_len=16"], "arguments of verl's reward managers"),
    ],
)
def test_what_a_run_cannot_have_is_refused(given, words):
    (fault, *_) = faults(composed(TINY, given))
    assert re.search(words, fault), fault
