"""What the maths reward pays for, and above all what it does not pay for."""

import json
import threading
import time
from pathlib import Path

import pytest

from verl_patches.errors import ConfigError
from verl_patches.rewards import answer_checker
from verl_patches.rewards.maths import compose, compute_score, last_box

SAMPLE = Path(__file__).resolve().parents[2] / "data" / "deepscaler_sample.json"


def score(text, gold="42", **options):
    return compute_score("test", text, gold, **options)


RIGHT = {"score": 1.0, "acc": 1.0, "format": 1.0}
WRONG = {"score": 0.1, "acc": 0.0, "format": 1.0}
UNFORMED = {"score": 0.0, "acc": 0.0, "format": 0.0}


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{42}",
        r"We get $\boxed{ 42 }$, which is the answer.",
        r"First \boxed{7}, no: \boxed{42}",
        r"\boxed {42}",
        r"stray } brace and { another, then \boxed{42}",
        r"\boxed{42} and so it ends {",
        "日本語 → \\boxed{42}。",
        r"An escaped \{ brace \boxed{42}",
    ],
)
def test_the_last_closed_box_counts(text):
    assert score(text) == RIGHT


@pytest.mark.parametrize(
    "text",
    [
        r"The answer is 42. \boxed{41}",  # gold string elsewhere
        r"\boxed{42} or rather \boxed{41}",  # the last box is another
        r"42 \boxed{x} 42",
        r"\boxed{4}2",
        r"\boxed{42, 41}",
        r"\boxed{41 \text{ or } 42}",
        r"\boxed{4 2}",
        r"\boxed{41 1}",  # read as a sum by math-verify
        r"\boxed{41=42}",
        r"\boxed{1=2=42}",
        r"\boxed{$41$ and $42$}",
        r"\boxed{\text{answer: \(42\)} 41}",
        r"\boxed{42x}",
        r"\boxed{\frac{42}{0}}",
        "\\boxed{４２}",  # full-width digits
        "\\boxed{42\u200b1}",
        "\\boxed{\ud800}",
    ],
)
def test_a_wrong_answer_in_a_box_earns_only_its_form(text):
    assert score(text) == WRONG


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "#### 42",
        r"$42$",
        r"boxed{42}",
        r"\\boxed{42}",  # a line break and a word
        r"\boxed 42",
        r"\fbox{42}",
        r"\boxed{}",
        r"\boxed{  }",
        r"\boxed{42",
        r"\boxed{42} and \boxed{42",  # the last one is not closed
        r"\boxed{42\}",
        r"\boxed{\frac{42}{1}",
        r"\boxed{\boxed{42}}",  # a box inside a box
        r"\boxed{41 \boxed{42}}",
        r"\boxed{42 \boxed{41}}",
        r"\boxed{" + "4" * 600 + "}",
    ],
)
def test_what_is_not_a_closed_box_with_an_answer_earns_nothing(text):
    assert score(text) == UNFORMED


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("1/2", "0.5"),
        ("1/2", r"\frac12"),
        (r"\frac{1}{2}", r"\dfrac{2}{4}"),
        (r"-\frac{1}{2}", "-0.5"),
        ("-5", "−5"),
        ("3/2", r"1\frac{1}{2}"),
        ("3/2", "1 1/2"),
        ("1000", "1,000"),
        ("1000", r"1\,000"),
        ("5", r"\$5"),
        ("12", r"12\text{ cm}"),
        ("5", "x = 5"),
        ("5", "5."),
        (r"\frac{1}{3}", "0.333333"),
        (r"2\sqrt{2}", r"\sqrt{8}"),
        (r"117\pi", r"\pi \cdot 117"),
        (r"(-\infty, 3)", r"(-\infty,3)"),
        ("[1, 2]", r"\left[1,2\right]"),
        ("x<3", r"(-\infty,3)"),
        (r"[1,2]\cup[3,4]", "[3,4]∪[1,2]"),
        (r"\{1, 2\}", r"\{2,1\}"),
        ("(3, -2)", "(3,-2)"),
        (r"65\%", "65%"),
        (r"65\%", "65"),
        (r"65\%", "0.65"),
        ("65", r"65\%"),
        ("0.65", r"65\%"),
        (r"2x^2 + 8x + 6", r"2(x+1)(x+3)"),
        (r"\text{even}", "even"),
        (r"\boxed{7}", "7"),
        (7, "7.0"),
    ],
)
def test_equal_answers(gold, answer):
    assert score(rf"\boxed{{{answer}}}", gold) == RIGHT


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        (r"\frac{1}{3}", "0.33"),
        ("1/2", "1/3"),
        ("(1, 2]", "(1, 2)"),
        ("[1, 2]", "(1, 2)"),
        (r"\{1, 2\}", r"\{1, 3\}"),
        (r"\{1, 2\}", "1"),
        ("(3, -2)", "(-2, 3)"),
        (r"65\%", "6.5"),
        ("0.5", r"0.5\%"),
        (r"0.5\%", "0.5"),
        (r"117\pi", "117"),
        ("5", "-5"),
        ("0.00000012", "0"),
        (r"\text{even}", r"\text{odd}"),
    ],
)
def test_unequal_answers(gold, answer):
    assert score(rf"\boxed{{{answer}}}", gold) == WRONG


def test_keyword_call_with_weights_as_verl_makes_it():
    result = compute_score(
        data_source="d", solution_str=r"\boxed{1}", ground_truth="2", extra_info={"index": 0}, format_weight=0.0
    )
    assert result == {"score": 0.0, "acc": 0.0, "format": 1.0}


@pytest.mark.parametrize("gold", ["", "  ", None, ["42"]])
def test_a_bad_gold_answer_is_an_error_and_not_a_zero(gold):
    with pytest.raises(ConfigError, match="gold answer"):
        score(r"\boxed{42}", gold)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("42 " * 3_333_333 + r"\boxed{21+21}", RIGHT),
        ("{" * 10_000_000 + r"\boxed{42}", RIGHT),
        (r"\boxed{" * 1_500_000 + "42" + "}" * 1_500_000, UNFORMED),
        (r"\boxed{42" + "x" * 10_000_000, UNFORMED),
        (r"\boxed" + " " * 10_000_000 + "{42}", UNFORMED),
        (r"\boxed{" + "9" * 10_000_000 + "}", UNFORMED),
        (r"\boxed{42}" + "\\" * 10_000_000, UNFORMED),  # too far from the end
    ],
    ids=["words", "braces", "boxes", "unclosed", "blanks", "digits", "backslashes"],
)
def test_ten_million_characters_take_less_than_a_second(text, expected):
    score(r"\boxed{21+21}")  # the helper is up
    start = time.perf_counter()
    assert score(text) == expected
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "10^{10^{10}}",
        "(" * 200 + "1" + ")" * 200,
        pytest.param("9^{9^{9^{9}}}", marks=pytest.mark.slow),
        pytest.param(r"\binom{10^{8}}{5 \cdot 10^{7}}", marks=pytest.mark.slow),
    ],
)
def test_an_answer_that_would_compute_for_ever_is_wrong_after_its_cpu_limit(answer):
    start = time.process_time(), time.perf_counter()
    assert score(rf"\boxed{{{answer}}}", cpu_limit_s=0.3) == WRONG
    assert time.process_time() - start[0] < 1.0
    assert time.perf_counter() - start[1] < 15.0  # on a busy machine; about 0.3 s on an idle one
    assert score(r"\boxed{84/2}") == RIGHT  # and the next one is compared as ever


@pytest.mark.slow
def test_the_cpu_limit_is_what_stops_it():
    """Negative control: the same question without the small limit is answered."""
    slow = r"\boxed{\binom{30000}{15000} - \binom{30000}{15000} + 42}"
    assert score(slow, cpu_limit_s=0.02) == WRONG
    assert score(slow, cpu_limit_s=30.0) == RIGHT


def test_any_thread_may_ask_and_answers_do_not_mix():
    results = {}

    def ask(i):
        results[i] = [score(rf"\boxed{{{n}+{i}}}", str(n + i + (n % 2)))["acc"] for n in range(20)]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert results == {i: [1.0, 0.0] * 10 for i in range(4)}


def test_the_solutions_of_the_sample_are_right_and_shifted_answers_wrong():
    rows = json.loads(SAMPLE.read_text())
    assert all(score(row["solution"], row["answer"]) == RIGHT for row in rows)
    numbers = [row["answer"] for row in rows if row["answer"].lstrip("-").isdigit()][::4]
    assert len(numbers) > 25
    assert not any(score(rf"\boxed{{{int(answer) + 1}.0}}", answer)["acc"] for answer in numbers)
    assert all(score(rf"\boxed{{{answer}.0}}", answer)["acc"] for answer in numbers)


def test_every_kind_of_answer_in_the_sample_can_be_read():
    """The boxes above equal the gold string; here each is asked of math-verify in another spelling."""
    rows = json.loads(SAMPLE.read_text())[:48]
    other = [
        row["answer"].replace(r"\frac", r"\dfrac").replace("(", r"\left( ").replace(")", r" \right)") for row in rows
    ]
    wrong = [
        (row["answer"], spelled)
        for row, spelled in zip(rows, other, strict=True)
        if score(rf"\boxed{{{spelled}  }}", row["answer"]) != RIGHT
    ]
    assert not wrong


def test_last_box_reads_only_the_end():
    assert last_box(r"\boxed{1}" + "x" * 65_527 + "y") is None
    assert last_box(r"\boxed{1}" + "x" * 65_527) == "1"


def test_one_checker_per_process():
    assert answer_checker.shared_answer_checker() is answer_checker.shared_answer_checker()


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
