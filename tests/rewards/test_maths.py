"""Test the maths reward: which responses it rewards, and which it must not."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.rewards.maths import compute_score, last_box

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "deepscaler_sample.json"
RIGHT, WRONG, UNFORMED = (
    {"score": s, "acc": a, "format": f} for s, a, f in ((1.0, 1.0, 1.0), (0.1, 0.0, 1.0), (0, 0, 0))
)


def score(text, gold="42", **options):
    """Return the reward; unless `options` has another, the time limit is one that no busy machine reaches."""
    return compute_score("test", text, gold, **{"cpu_limit_s": 60.0, **options})


# responses, separated by " ; "
RIGHT_BOXES = r"""
\boxed{42} ; We get $\boxed{ 42 }$, which is the answer. ; First \boxed{7}, no: \boxed{42} ; \boxed {42}
 ; stray } brace and { another, then \boxed{42} ; \boxed{42} and so it ends { ; 日本語 → \boxed{42}。
 ; An escaped \{ brace \boxed{42} ; \boxed{４２}"""
# the gold text outside the last box, several answers in one box, sums, equations, other wide digits, digits in circles
WRONG_BOXES = r"""
The answer is 42. \boxed{41} ; \boxed{42} or rather \boxed{41} ; 42 \boxed{x} 42 ; \boxed{4}2 ; \boxed{42, 41}
 ; \boxed{41 \text{ or } 42} ; \boxed{4 2} ; \boxed{41 1} ; \boxed{41=42} ; \boxed{1=2=42} ; \boxed{$41$ and $42$}
 ; \boxed{\text{answer: \(42\)} 41} ; \boxed{42x} ; \boxed{\frac{42}{0}} ; \boxed{４３} ; \boxed{④②}"""
# no box, an empty one, a last one that is not closed, a box inside a box
NO_BOXES = r"""
42 ; #### 42 ; $42$ ; boxed{42} ; \\boxed{42} ; \boxed 42 ; \fbox{42} ; \boxed{} ; \boxed{  } ; \boxed{42
 ; \boxed{42} and \boxed{42 ; \boxed{42\} ; \boxed{\frac{42}{1} ; \boxed{\boxed{42}} ; \boxed{41 \boxed{42}}
 ; \boxed{42 \boxed{41}}"""


def texts(table, *more):
    return [*table.strip("\n").replace("\n ; ", " ; ").split(" ; "), *more]


@pytest.mark.parametrize("text", texts(RIGHT_BOXES))
def test_the_last_closed_box_counts(text):
    assert score(text) == RIGHT


@pytest.mark.parametrize("text", texts(WRONG_BOXES, "\\boxed{42\u200b1}", "\\boxed{\ud800}"))
def test_a_wrong_answer_in_a_box_earns_only_its_form(text):
    assert score(text) == WRONG


@pytest.mark.parametrize(("gold", "answer"), [("1/2", "0.5"), (r"\boxed{7}", "7"), (7, "7.0")])
def test_a_gold_answer_may_be_in_a_box_or_a_number(gold, answer):
    """Check a box and a number; test_equivalence.py has more pairs."""
    assert score(rf"\boxed{{{answer}}}", gold) == RIGHT


@pytest.mark.parametrize("text", texts(NO_BOXES, "", r"\boxed{" + "4" * 600 + "}"))
def test_what_is_not_a_closed_box_with_an_answer_earns_nothing(text):
    assert score(text) == UNFORMED


@pytest.mark.parametrize("gold", ["", "  ", None, ["42"]])
def test_a_bad_gold_answer_is_an_error_and_not_a_zero(gold):
    with pytest.raises(ConfigError, match="gold answer"):
        score(r"\boxed{42}", gold)


def test_ten_million_characters_take_time_in_proportion():
    """Score each text in 0.1 s, which would take days if time grew with the square of the length."""
    assert score("42 " * 3_333_333 + r"\boxed{21+21}") == score("{" * 10_000_000 + r"\boxed{42}") == RIGHT
    for text in (
        r"\boxed{" * 1_500_000 + "42" + "}" * 1_500_000,
        r"\boxed{42" + "x" * 10_000_000,
        r"\boxed" + " " * 10_000_000 + "{42}",
        r"\boxed{" + "9" * 10_000_000 + "}",
        r"\boxed{42}" + "\\" * 10_000_000,  # the box is too far from the end
    ):
        assert score(text) == UNFORMED, text[:10]


SLOW_ANSWERS = r"""
\binom{10^{8}}{5 \cdot 10^{7}} ; (10^9)! ; e^{e^{e^{e^{e}}}} ; x^{x^{x^{x^{x^{x^{x^{x^{x^{x^{x^{x^{x}}}}}}}}}}}}"""
SLOW = (pytest.param(text, marks=pytest.mark.slow) for text in texts(SLOW_ANSWERS))


@pytest.mark.parametrize("answer", ["10^{10^{10}}", "(" * 200 + "1" + ")" * 200, *SLOW])
def test_a_comparison_that_does_not_end_is_wrong_after_its_cpu_limit(answer):
    assert score(rf"\boxed{{{answer}}}", cpu_limit_s=0.3) == WRONG  # without the limit it does not end
    assert score(r"\boxed{84/2}") == RIGHT  # the next answer is compared as before


def test_answers_of_several_threads_are_not_mixed_up():
    def compare(i):
        return [score(rf"\boxed{{{n}+{i}}}", str(n + i + (n % 2)))["acc"] for n in range(20)]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(compare, range(4))) == [[1.0, 0.0] * 10] * 4


def test_the_solutions_of_the_sample_are_right_and_shifted_answers_wrong():
    rows = json.loads(SAMPLE.read_text())
    assert all(score(row["solution"], row["answer"]) == RIGHT for row in rows)
    numbers = [row["answer"] for row in rows if row["answer"].lstrip("-").isdigit()][::4]
    assert len(numbers) > 25
    assert not any(score(rf"\boxed{{{int(answer) + 1}.0}}", answer)["acc"] for answer in numbers)
    for gold in (row["answer"] for row in rows[:48]):  # in another spelling, so that math-verify compares them
        answer = gold.replace(r"\frac", r"\dfrac").replace("(", r"\left( ").replace(")", r" \right)")
        assert score(rf"\boxed{{{answer}  }}", gold) == RIGHT


def test_last_box_reads_only_the_end():
    assert last_box(r"\boxed{1}" + "x" * 65_527 + "y") is None
    assert last_box(r"\boxed{1}" + "x" * 65_527) == "1"


def test_the_score_of_form_and_answer():
    assert [score(text) for text in (r"\boxed{42}", r"\boxed{1}", "42", r"\boxed{}")] == [RIGHT, WRONG, *[UNFORMED] * 2]
    for weight in (0.0, 0.25, 0.5):
        found = [score(text, format_weight=weight)["score"] for text in (r"\boxed{42}", r"\boxed{1}", "42")]
        assert found == [1.0, weight, 0.0]
    assert score(r"\boxed{1}", format_weight=0.0) == {"score": 0.0, "acc": 0.0, "format": 1.0}
