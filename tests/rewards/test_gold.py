"""Test that gold answers which could never score are found, in the forms that prompts ask for."""

import time

import pytest
from verl.workers.reward_manager import NaiveRewardManager

from verl_patches.recipe import Part, Reward
from verl_patches.rewards.gold import GoldCheck, gold_fault

BOXED = "What is 1+0? Let's think step by step and output the final answer within \\boxed{}."
ANSWER = "The last line of your response should be of the form Answer: $Answer (without quotes).\n\nWhat is 1+0?\n\n"
ANSWER += 'Remember to put your answer on its own line after "Answer:".'
HASHES = 'What is 1+0? Let\'s think step by step and output the final answer after "####".'
FEW_SHOT = "Question: What is 0+0?\nAnswer: 0\nQuestion: What is 1+0?\nAnswer:"


NO_REQUEST = (  # a cue to answer, and text of the task
    "What is the slope of the line? Answer:",
    "Tom starts with 3 apples and buys 4. How many? Answer: ",
    "In which format is it? Answer:",
    "Tom ends up with #### and 3 more.",
)


def fault(reward, source, prompt, gold):
    parts = [Part("recipe.rewards[0]", reward, Reward(reward))]
    return GoldCheck(parts, NaiveRewardManager(None, 0).compute_score).row_fault(source, prompt, gold, None)


@pytest.mark.parametrize(("gold", "words"), [
    ("#### 34", "a `####` line"), ('["34"]', "a JSON list"), ("<answer>34</answer>", "text with tags"),
    ("\u0663\u0664", "digits other than 0 to 9"), ("3\n4", "several lines"), ("", "has 0 characters"),
    (None, "is None"), (True, "is True"), ("1" * 513, "has 513 characters"),
])  # fmt: skip
def test_what_no_model_writes_is_refused(gold, words):
    assert words in gold_fault(gold)
    assert words in fault("maths", "any", BOXED, gold) and "data build" in fault("by_source", "any", BOXED, gold)


@pytest.mark.parametrize("gold", ["34", 2.5, "\\boxed{\\{1, 2\\}}", "\\begin{pmatrix}\n1\n\\end{pmatrix}", "３４"])
def test_what_a_model_writes_is_accepted(gold):
    assert gold_fault(gold) is None
    for prompt in (BOXED, "What is 1+0?", FEW_SHOT, *NO_REQUEST):
        assert fault("maths", "any", prompt, gold) is None


@pytest.mark.parametrize(("reward", "source", "prompt", "fits"), [
    ("maths", "any", ANSWER, False), ("maths", "any", HASHES, False), ("by_source", "math_dapo", ANSWER, False),
    ("data_source", "math_dapo", ANSWER, True), ("data_source", "openai/gsm8k", HASHES, True),
    ("data_source", "openai/gsm8k", "What is 1+0?", True), ("data_source", "openai/gsm8k", BOXED, False),
    ("data_source", "lighteval/MATH", BOXED, True), ("data_source", "lighteval/MATH", ANSWER, False),
    ("maths", "any", ANSWER + BOXED, True),
])  # fmt: skip
def test_the_right_answer_scores_in_the_form_that_the_prompt_asks_for(reward, source, prompt, fits):
    found = fault(reward, source, prompt, "72")
    assert (found is None) == fits and (fits or "in the form that the prompt asks for" in found)


def test_a_gold_answer_that_equals_nothing_is_refused():
    assert "scores below 1" in fault("maths", "any", "What is 1+0?", "\\frac{1}{")


def test_a_data_source_that_the_reward_does_not_know_is_refused():
    assert "verl has no score for data_source 'mine'" in fault("data_source", "mine", BOXED, "1")
    assert fault("maths", "mine", BOXED, "1") is None
    assert "expected one of small, capitals, marks" in fault("by_source", "verl_patches/same_kind", "x", "1")
    assert fault("by_source", "verl_patches/same_kind", "x", "small") is None


def test_functions_of_the_user_and_scores_that_run_code_are_not_called():
    check = GoldCheck([Part("recipe.rewards[0]", "python", Reward("python", path="absent.py"))], lambda: None)
    assert list(map(str, check.skipped)) == ["recipe.rewards[0] (python)"]
    assert check.row_fault("any", BOXED, None, None) is None

    def score(data_source, solution_str, ground_truth):
        assert solution_str == ""  # a call that finds out whether the source is known
        return 0.0

    check = GoldCheck([Part("data.reward_fn_key", "data_source", Reward("data_source"))], score)
    assert check.row_fault("codecontests", BOXED, "{}", None) is None


def test_equal_text_needs_no_helper_process(monkeypatch):
    """Compare 2,000 gold answers by their text alone, as a start has tens of thousands."""
    monkeypatch.setattr("verl_patches.rewards.maths._are_equal", lambda *_: time.sleep(60))
    assert not any(fault("maths", "any", BOXED, f"\\frac{{{n}}}{{3}}") for n in range(2000))
