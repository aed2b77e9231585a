"""Test eval's intervals and pass@k against definitions, the scorer against the training's reward, and the picture."""

import itertools
import json
import statistics
from math import comb, sqrt

import pytest

from verl_patches.tools.inference.scores import bootstrap_interval, checkpoint_score, measure, wilson_interval


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
    prompts = [[1, 0, 0, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]
    found = measure(prompts)
    assert list(found["pass"]) == [1, 2, 4, 5] and found["n"] == 5
    for k, value in found["pass"].items():
        shares = [sum(any(some) for some in itertools.combinations(prompt, k)) / comb(5, k) for prompt in prompts]
        assert value == pytest.approx(statistics.fmean(shares))
    assert found["pass"][1] == pytest.approx(found["mean"])
    assert measure([[1, 0.5], [0, 1]])["pass"] == measure([[1], [0]])["pass"] == {}  # no share, and one response


def test_wilsons_interval_of_the_literature():
    """Check Newcombe 1998, Stat. Med. 17:857, table I: 81 of 263, 15 of 148, 0 of 20, 1 of 29."""
    published = {
        (81, 263): (0.2553, 0.3662),
        (15, 148): (0.0624, 0.1605),
        (0, 20): (0, 0.1611),
        (1, 29): (0.0061, 0.1718),
    }
    for (correct, count), expected in published.items():
        assert wilson_interval(correct, count) == pytest.approx(expected, abs=5e-5)


def test_the_interval_is_wilsons_of_single_answers_and_else_bootstraps():
    one, several = measure([[1.0]] * 3 + [[0.0]] * 5), measure([[1.0, 0.0]] * 3 + [[0.0, 0.0]] * 5)
    assert (one["low"], one["high"]) == wilson_interval(3, 8)
    assert (several["low"], several["high"]) == bootstrap_interval([0.5] * 3 + [0.0] * 5)
    means = [number / 100 for number in range(101)]
    low, high = bootstrap_interval(means)
    expected = 1.96 * statistics.pstdev(means) / sqrt(101)
    assert 0.5 - low == pytest.approx(expected, rel=0.15) and high - 0.5 == pytest.approx(expected, rel=0.15)
    assert (low, high) == bootstrap_interval(means)  # the same for the same data


def test_a_checkpoint_is_scored_by_the_mean_over_sources():
    def line(source, *values):
        return {"data_source": source, "responses": [{"value": value} for value in values]}

    found = checkpoint_score(5, [line("a", 1, 1), line("a", 1, 0), line("b", 0, 0)])
    assert (found["step"], found["score"], found["sources"]["a"]["mean"]) == (5, 0.375, 0.75)


SCORE = """
import json, sys
from verl_patches import prelude_patch
from transformers import AutoTokenizer
from tests.runs import composed
from verl_patches.errors import RecipeError
from verl_patches.tools.inference.scores import scorer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
rewards = "recipe.rewards=[{name: maths},{name: length,buffer_tokens: 4}]"
run = composed("deepseekv3_tiny_cpu", [rewards, "data.max_response_length=32"])
row = {"data_source": "x", "reward_model": {"ground_truth": "4"}, "extra_info": None}
score = scorer(run, tokenizer, row)
texts = ["is \\\\boxed{4}", "\\\\boxed{4}<|end|>ignored \\\\boxed{5}", "\\\\boxed{5}"]
found = score(row, [tokenizer(text)["input_ids"] for text in texts])
try:
    scorer(run, tokenizer, {"data_source": "x"})
except RecipeError as error:
    found.append(str(error))
print(json.dumps(found))
"""


@pytest.mark.slow
def test_responses_are_scored_by_the_parts_of_the_reward_up_to_their_end(run_warm, tiny_model):
    done = run_warm(SCORE, str(tiny_model), patches="line=pypi,platform=cpu", env={"VLLM_USE_V1": "0"}).check()
    first, ended, wrong, error = json.loads(done.out.splitlines()[-1])
    assert (first["value"], ended["value"], wrong["value"]) == (1.0, 1.0, 0.0)  # acc, not the sum with the penalty
    assert wrong["reward"] == pytest.approx(0.1) and wrong["format"] == 1.0
    assert wrong["reward/length"] == 0  # it ends before the limit, with another token than the tokenizer's end
    assert "recipe.rewards[0] (maths)" in error
