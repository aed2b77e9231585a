"""Test which answers are equal: the pairs of equal_pairs.txt, hostile answers, and random values in many spellings."""

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.rewards.equivalence import equivalent

PAIRS = (Path(__file__).parent / "equal_pairs.txt").read_text().splitlines()[1:]


def pairs(lines, sign):
    return [tuple(line.split(f"   {sign}   ")) for line in lines if f"   {sign}   " in line]


def test_no_wrong_pair_is_equal():
    assert [pair for pair in pairs(PAIRS, "!=") if equivalent(*pair)] == []


def test_nine_in_ten_right_pairs_are_equal_and_the_others_are_known():
    right, missed = pairs(PAIRS, "=="), pairs(PAIRS, "=?")
    assert [pair for pair in right if not equivalent(*pair)] == []
    assert [pair for pair in missed if equivalent(*pair)] == []
    assert 9 * len(missed) < len(right) and len(right) > 340
    golds = [gold for gold, _ in right + missed + pairs(PAIRS, "!=")]
    assert [gold for gold in golds if not equivalent(gold, gold)] == []


# answers that must not equal 42
HOSTILE = r"""
41=42 ; \not=42 ; 4\quad 2 ; 4 2 ; 4. 2 ; 42{} 1 ; 42_{max} ; 42' ; 42|_2 ; 40\{2\} ; 42, 41 ; 41 \text{ or } 42 ; 42\%
\pm42 ; \text{42 or 41} ; 42\text{ tenths} ; 42 \ldots ; x42 ; \boxed{42} ; $41$42 ; 42} ; {42 ; ④② ; ٤٢ ; 4.2.0 ; 42!!
0x2A ; \frac{42}{0} ; \frac{42}{1}{1} ; 42\cup( ; 6:42 ; answer: 42 ; 42^1^1 ; \sum 42"""
UNEQUAL = r"""
5.6 ; 5. 6
x ; x^{T}
[3,-2] ; (3,-2)
5千米 ; 5000
x^2=-1 ; 1=2
5,5,6 ; 5,6,6
2^9 ; 2^3^2
\frac{1}{|x|\sqrt{x^2-1}} ; \frac{1}{x\sqrt{x^2-1}}
x ; x+10^{-20}"""


@pytest.mark.parametrize("answer", HOSTILE.strip().replace("\n", " ; ").split(" ; "))
def test_a_hostile_answer_equals_no_number(answer):
    assert not equivalent("42", answer)


@pytest.mark.parametrize("pair", UNEQUAL.strip().split("\n"))
def test_what_a_looser_comparison_takes_for_equal_is_not(pair):
    assert not equivalent(*pair.split(" ; "))


NUMBERS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=997)


def spellings(value: Fraction) -> list[tuple[str, Fraction]]:
    """Draw (text, value) of a fraction in TeX."""
    top, bottom = value.numerator, value.denominator
    sign, size = ("-" if top < 0 else ""), abs(top)
    found = [rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", rf"{sign}\dfrac{{{3 * size}}}{{{3 * bottom}}}"]
    whole, rest = divmod(size, bottom)
    if whole and rest:
        found.append(rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}")
    if bottom == 1:
        found += [f"{top}.0", rf"{sign}{size:,}", rf"x = {top}", rf"{top}\text{{ cm}}"]
    return [(text, value) for text in found]


@settings(max_examples=25, deadline=None)
@given(NUMBERS, NUMBERS)
def test_spellings_of_one_number_are_equal_and_of_two_numbers_are_not(one, other):
    for text, number in spellings(one):
        assert equivalent(str(number), text), (number, text)
        for wrong in {other, number + 1, -number, 10 * number + 1, number / 3} - {number}:
            assert not equivalent(str(wrong), text), (wrong, text)
