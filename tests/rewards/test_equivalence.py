"""Which answers are equal: the pairs of equal_pairs.txt, symmetry, and random values in many spellings."""

from fractions import Fraction
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.rewards.equivalence import equivalent

PAIRS = (Path(__file__).parent / "equal_pairs.txt").read_text().splitlines()[1:]
EQUAL = [tuple(line.split("   ==   ")) for line in PAIRS if "   ==   " in line]
UNEQUAL = [tuple(line.split("   !=   ")) for line in PAIRS if "   !=   " in line]


def test_pairs_are_equal_or_not_as_the_file_says():
    assert len(EQUAL) + len(UNEQUAL) == len(PAIRS) and len(EQUAL) > 80 and len(UNEQUAL) > 80
    assert [pair for pair in EQUAL if not equivalent(*pair)] == []
    assert [pair for pair in UNEQUAL if equivalent(*pair)] == []
    assert [gold for gold, _ in EQUAL + UNEQUAL if not equivalent(gold, gold)] == []


NUMBERS = st.fractions(min_value=-(10**6), max_value=10**6, max_denominator=997)


def spellings(value: Fraction) -> list[str]:
    top, bottom = value.numerator, value.denominator
    sign, size = ("-" if top < 0 else ""), abs(top)
    found = [rf"\frac{{{top}}}{{{bottom}}}", f"{top}/{bottom}", rf"{sign}\dfrac{{{3 * size}}}{{{3 * bottom}}}"]
    whole, rest = divmod(size, bottom)
    if whole and rest:
        found.append(rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}")
    if bottom == 1:
        found += [f"{top}.0", rf"{sign}{size:,}", rf"x = {top}", rf"{top}\text{{ cm}}"]
    return found


@settings(max_examples=25, deadline=None)
@given(NUMBERS, NUMBERS)
def test_spellings_of_one_number_are_equal_and_of_two_numbers_are_not(one, other):
    for text in spellings(one):
        assert equivalent(str(one), text), (one, text)
        assert one == other or not equivalent(str(other), text), (other, text)


@settings(max_examples=60, deadline=None)
@given(st.text("0123456789.,=<>()[]{}\\+-*/^_ abxfACi'%$", max_size=14))
def test_no_text_breaks_the_rules_and_none_equals_a_number_that_it_is_not(text):
    """Errors that `equivalent` raises count as unequal in the helper process; they must be those of its libraries."""
    try:
        found = equivalent("7919", text)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RecursionError):
        found = False
    assert not found or "7919" in text.replace(",", "")
