"""Which answers are equal: the pairs of equal_pairs.txt, and random values in many spellings."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.rewards.answer_checker import AnswerChecker
from verl_patches.rewards.answer_text import MAX_SIGNS, items, normalise
from verl_patches.rewards.equivalence import equivalent

PAIRS = (Path(__file__).parent / "equal_pairs.txt").read_text().splitlines()[1:]
EQUAL = [tuple(line.split("   ==   ")) for line in PAIRS if "   ==   " in line]
UNEQUAL = [tuple(line.split("   !=   ")) for line in PAIRS if "   !=   " in line]


def test_pairs_are_equal_or_not_as_the_file_says():
    assert len(EQUAL) + len(UNEQUAL) == len(PAIRS) and min(len(EQUAL), len(UNEQUAL)) > 290
    assert [pair for pair in EQUAL if not equivalent(*pair)] == []
    assert [pair for pair in UNEQUAL if equivalent(*pair)] == []
    assert [gold for gold, _ in EQUAL + UNEQUAL if not equivalent(gold, gold)] == []


def test_signs_are_independent_unless_one_is_the_other_ones_reverse():
    assert items(r"\pm 2\pm 3") == ["+2+3", "+2-3", "-2+3", "-2-3"]
    assert items(r"\pm 2\mp 3") == ["+2-3", "-2+3"]
    many = r"\pm 1" * (MAX_SIGNS + 1)
    assert items(many) == [many] and len(items(r"\pm 1" * MAX_SIGNS)) == 2**MAX_SIGNS
    for unclear in (many, r"\pm 1\pm 2\mp 3"):
        assert items(unclear) == [unclear]
        assert not equivalent("0", unclear) and not equivalent(r"\pm 10", unclear)


def test_the_text_of_other_signs_stays_as_it_is():
    assert [normalise(text) for text in "①②④ ⑴ Ⅳ ٤٢ 是 ㍿".split()] == "①②④ ⑴ Ⅳ ٤٢ 是 ㍿".split()


NUMBERS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=997)
WIDE = str.maketrans("0123456789.-/", "０１２３４５６７８９．－／")
RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
VULGAR = {Fraction(1, 2): "½", Fraction(1, 3): "⅓", Fraction(2, 3): "⅔", Fraction(3, 4): "¾", Fraction(5, 8): "⅝"}


def spellings(value: Fraction) -> list[tuple[str, Fraction]]:
    """(text, value) of a fraction in TeX."""
    top, bottom = value.numerator, value.denominator
    sign, size = ("-" if top < 0 else ""), abs(top)
    found = [rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", rf"{sign}\dfrac{{{3 * size}}}{{{3 * bottom}}}"]
    whole, rest = divmod(size, bottom)
    if whole and rest:
        found.append(rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}")
    if bottom == 1:
        found += [f"{top}.0", rf"{sign}{size:,}", rf"x = {top}", rf"{top}\text{{ cm}}"]
    return [(text, value) for text in found]


def typed(value: int, part: Fraction) -> list[tuple[str, Fraction]]:
    """(text, value) of an integer and a proper fraction, as they may be typed without TeX."""
    mixed = value + part if value >= 0 else value - part
    return [
        (str(value).translate(WIDE), Fraction(value)),
        (f"{value}{VULGAR[part]}" if value else VULGAR[part], mixed),
        (f"{value}厘米".translate(WIDE), Fraction(value)),
        (f"{value}.00元", Fraction(value)),
        (f"{'-' if value < 0 else ''}${abs(value)}.00", Fraction(value)),
        (f"2{str(value % 12).translate(RAISED)}", Fraction(2 ** (value % 12))),
        (f"{value}度", Fraction(value)),
        (rf"{value}\frac{part.numerator}{part.denominator}" if value else "½", mixed if value else Fraction(1, 2)),
    ]


@settings(max_examples=25, deadline=None)
@given(NUMBERS, st.integers(-999, 999), st.sampled_from(sorted(VULGAR)), NUMBERS)
def test_spellings_of_one_number_are_equal_and_of_two_numbers_are_not(one, whole, part, other):
    for text, number in spellings(one) + typed(whole, part):
        assert equivalent(str(number), text), (number, text)
        for wrong in {other, number + 1, -number, 10 * number + 1, number / 3} - {number}:
            assert not equivalent(str(wrong), text), (wrong, text)


@pytest.fixture(scope="module")
def checker():
    """Ends a comparison that takes too long, and counts an error as unequal, as in a run."""
    checker = AnswerChecker()
    yield checker
    checker.close()


TEXTS = st.text("0123456789.,=<>()[]{}\\+-*/^_ abxfACi'%$", max_size=14)
TEXTS |= st.text("$\\£¥元厘米度个万½²₃５（）｛｝①√π≠± 0123.,^_{}-=/", max_size=16)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_no_text_equals_a_number_that_it_does_not_show(checker, text):
    assert not checker.equivalent("7919", text) or "7919" in text.replace(",", "")
