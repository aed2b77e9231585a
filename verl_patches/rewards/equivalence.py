r"""Whether two answers are equal. The rules are listed, with examples, in docs/maths-reward.md.

Answers are normalised (answer_text.py), then compared by what they are: words, numbers in another base, lists, named
values, intervals, sets and tuples, quantities with units, values. math-verify parses the LaTeX of values. Numbers are
compared here: exactly where both are rational, because math-verify rounds to 6 decimals, whatever the size.

`equivalent` may take for ever on an answer such as 10^{10^{10}}; answer_checker.py runs it in a process with limits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from fractions import Fraction
from math import gcd
from random import Random
from typing import Any, NamedTuple

from verl_patches.rewards.answer_text import (
    ALTERNATIVE,
    OR,
    UNION,
    bracketed,
    deepest,
    has_adjacent_numbers,
    is_too_large,
    items,
    normalise,
    split,
)
from verl_patches.rewards.units import quantity

MAX_DEPTH = 12  # of brackets; ANTLR's time grows steeply with depth
MAX_ITEMS = 32  # of a list or set
SIGNIFICANT_DIGITS = 6  # fewest of a rounded decimal that equals an exact value
DIGITS = 200  # significant ones in which two irrational numbers agree
POINTS, FEWEST_POINTS = 24, 4  # at which functions are compared; variables are positive at the second half

_UNSAFE = re.compile(r"\$|\\[(\[]|\\$|(?i:answer)")  # math-verify would search inside the answer for another answer
_EQUALS = re.compile(r"(?<![<>!:])=")
_GREEK = (
    "[Aa]lpha|[Bb]eta|[Gg]amma|[Dd]elta|(?:var)?epsilon|zeta|eta|(?:var)?[Tt]heta|kappa|[Ll]ambda|mu|nu|xi|rho|[Ss]igma"
    "|tau|(?:var)?[Pp]hi|chi|[Pp]si|[Oo]mega|ell"
)
_LENGTH = re.compile(r"[A-Z]{2,3}|\|[a-wz]\|")  # of a segment, an arc, a vector
_NAME = re.compile(
    r"\([A-Za-z](?:,[A-Za-z])+\)|[A-Za-z](?:_\{?\w+\}?)?'*(?:\(-?[A-Za-z0-9 ]+(?:,(?: ?-)?[A-Za-z0-9 ]+)*\))?"
    rf"|{_LENGTH.pattern}"
    r"|m?\\angle\s*[A-Z]{1,3}|\[[A-Z]{3,}\]"  # angles, areas
    rf"|\\(?:{_GREEK}|max|min|gcd|det|dim|deg)(?:_\{{?\w+\}}?)?|\\text\{{(?![^{{}}]*\b(?:not|no|never)\b)[^{{}}]*\}}"
)
_VARIABLE = r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega))(?:_\{?\w+\}?)?"
_IN_SET = re.compile(rf"({_VARIABLE})\s*\\in(?![A-Za-z])\s*(\\\{{[^\\]*\\\}})")
_SET_OF = re.compile(  # {x | x > 1}
    rf"^\\\{{\s*({_VARIABLE})\s*(?:\\in\s*\\mathbb\s*\{{?R\}}?\s*)?(?:\\mid(?![A-Za-z])|\||:)\s*([^{{}}|]*\1[^{{}}|]*)\\\}}$"
)
_COLON = re.compile(":")
# hours, minutes, a or p: 6:00, 5:30\text{ PM}, 11:05 a.m.
_CLOCK = re.compile(
    r"([01]?[0-9]|2[0-4]):([0-5][0-9])\W{0,4}(?:\\text\W{0,4})?(?:([ap])\W{0,2}m)?\W{0,4}", re.IGNORECASE
)
_RELATED = re.compile(r"<|>|\\(?:le|ge|ne)(?![A-Za-z])")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)")


def equivalent(gold: str, answer: str) -> bool:
    """Whether `answer` equals `gold`; both are LaTeX or plain text without a box around them."""
    if _same_triples(gold, answer):
        return True
    gold, answer = normalise(gold), normalise(answer)
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    if _UNSAFE.search(answer) or has_adjacent_numbers(answer) or deepest(answer) > MAX_DEPTH:
        return False
    if is_too_large(gold) or is_too_large(answer):
        return False
    if has_adjacent_numbers(gold):  # read by nobody in one way: equal as text only
        return False
    return _equal(gold, answer)


_TRIPLES = re.compile(r"\s*[1-9][0-9]{2}(?:,(?:\\?\s)*[0-9]{3})+\s*")


def _same_triples(gold: str, answer: str) -> bool:
    """Whether both are the list 376, 625, which without a space is read as one number elsewhere."""
    texts = (gold, answer)
    if not all(map(_TRIPLES.fullmatch, texts)) or not any(re.search(r",\\?\s", text) for text in texts):
        return False
    return re.findall("[0-9]+", gold) == re.findall("[0-9]+", answer)


def _equal(gold: str, answer: str) -> bool:
    gold, answer = (_SET_OF.sub(r"\2", text.strip()) for text in (gold, answer))
    if not gold or not answer:
        return False
    sets = _IN_SET.fullmatch(gold), _IN_SET.fullmatch(answer)
    if any(sets):
        same = not all(sets) or sets[0][1] == sets[1][1]
        return same and _equal(*(match[2] if match else text for match, text in zip(sets, (gold, answer), strict=True)))
    words = _words(gold), _words(answer)
    if words != (None, None):
        if None in words and (plain := _THREE_LETTERS.fullmatch((gold, answer)[words.index(None)])):
            return plain[0] in words
        return words[0] == words[1]
    bases = _in_base(gold), _in_base(answer)
    if bases != (None, None):
        return bases[0] == bases[1]
    lists = items(gold), items(answer)
    if max(map(len, lists)) > 1:
        related = _RELATED.search(gold) or _RELATED.search(answer)
        return (_equal_relations if related else _equal_lists)(gold, answer, *lists)
    if max(len(split(text, _EQUALS)) for text in (gold, answer)) > 1:
        return _equal_equations(gold, answer)
    intervals = _interval(gold), _interval(answer)
    if intervals != (None, None):
        return _equal_intervals(gold, answer, *intervals)
    if UNION.search(gold) or UNION.search(answer):
        return _equal_unions(gold, answer) or _equal_values(gold, answer)
    brackets = bracketed(gold), bracketed(answer)
    if None not in brackets:
        return _equal_brackets(*brackets)
    times = _CLOCK.fullmatch(gold), _CLOCK.fullmatch(answer)
    if times[0] and (_is_time(times[0]) or (times[1] and times[1][3])):
        return _same_time(*times)
    ratios = split(gold, _COLON), split(answer, _COLON)
    if max(map(len, ratios)) > 2:
        return len(ratios[0]) == len(ratios[1]) and all(map(_equal_values, *map(_shares, ratios)))
    return _equal_percents(gold, answer)


# -- words and bases --------------------------------------------------------------------------------------------------

_TEXT = re.compile(r"\\text\{([^{}]*)\}|([A-Za-z][A-Za-z .'-]*)")
_THREE_LETTERS = re.compile("[A-Za-z]{3}")  # a word where the other side is one, else a product of variables
_CHOICE = re.compile(r"(?:\\text\{)?\(([A-Z])\)\}?")
_BASE = re.compile(r"([+-]?[0-9A-Fa-f]+)_\{?\s*([0-9]+|\\text\{[a-z]+\})\s*\}?")
_FUNCTION = re.compile(r"(?:sin|cos|tan|log|ln|sqrt|pi)\b|.*\b(?:and|or)\b")


def _words(answer: str) -> str | None:
    r"""The word or phrase that an answer is, None for mathematics.

    Words: \text{...}, letters with a space, four letters or more, several capitals (points of a figure), one capital or
    (A). One to three small letters are variables. Case counts in words of less than four letters.
    """
    if choice := _CHOICE.fullmatch(answer):
        return choice[1]
    match = _TEXT.fullmatch(answer)
    text = " ".join((match[1] or match[2] or "").strip(" .").split()) if match else ""
    if not re.search("[A-Za-z]", text) or re.fullmatch("[a-z]", text):
        return None
    plain, letters = match[1] is None, text.replace(" ", "")
    is_word = len(letters) >= 4 or letters.isupper() or text.lower() in ("yes", "no") or re.search(r"\w{2} \w", text)
    if plain and (not is_word or _FUNCTION.match(text)):
        return None
    return text.lower() if len(text) >= 4 or text.lower() in ("yes", "no") else text


def _in_base(answer: str) -> tuple[str, str] | None:
    """(digits without leading zeros, base) of 1010_2."""
    match = _BASE.fullmatch(answer)
    return (match[1].lstrip("0").upper(), match[2]) if match else None


# -- lists, named values, sets and tuples -----------------------------------------------------------------------------


def _equal_lists(gold: str, answer: str, gold_items: list[str], answer_items: list[str]) -> bool:
    """A list is equal in any order, to a set too; a tuple or values with different names: in the same order."""
    gold_names, names = _named(gold_items), _named(answer_items)
    if len(gold_items) == 1 and (bracket := bracketed(gold)) and (bracket[0] == r"\{\}" or names):
        gold_items = bracket[1]
    if len(answer_items) == 1 and (bracket := bracketed(answer)) and (bracket[0] == r"\{\}" or gold_names):
        answer_items = bracket[1]
    if len(gold_items) != len(answer_items):
        return False
    if gold_names and names:
        return _same_items([f"{k}={v}" for k, v in gold_names], [f"{k}={v}" for k, v in names])
    if pairs := gold_names or names:
        values = [value for _, value in pairs]
        gold_items, answer_items = (values, answer_items) if gold_names else (gold_items, values)
        if len(dict(pairs)) == len(pairs):
            return all(map(_equal, gold_items, answer_items))
    return _same_items(gold_items, answer_items)


def _named(parts: list[str]) -> list[tuple[str, str]] | None:
    """[(name, value)] of a list in which every item is name = value; None for any other."""
    pairs = [tuple(side.strip() for side in split(part, _EQUALS)) for part in parts]
    return pairs if all(len(pair) == 2 and _NAME.fullmatch(pair[0]) for pair in pairs) else None


def _same_items(gold_items: Sequence[str], answer_items: Sequence[str]) -> bool:
    """Whether every gold item equals an answer's item of its own, in any order."""
    left = list(answer_items)
    if len(gold_items) != len(left) or len(left) > MAX_ITEMS:
        return False
    for gold in gold_items:
        equal = next((item for item in left if gold == item or _equal(gold, item)), None)
        if equal is None:
            return False
        left.remove(equal)
    return True


def _equal_brackets(gold: tuple[str, list[str]], answer: tuple[str, list[str]]) -> bool:
    if gold[0] != answer[0] or max(len(gold[1]), len(answer[1])) > MAX_ITEMS:
        return False
    if gold[0] != r"\{\}":
        return len(gold[1]) == len(answer[1]) and all(map(_equal, gold[1], answer[1]))
    there = all(any(_equal(one, other) for other in answer[1]) for one in gold[1])
    return there and all(any(_equal(one, other) for one in gold[1]) for other in answer[1])


def _equal_equations(gold: str, answer: str) -> bool:
    """x = 5 equals 5, and 2 + 3 = 5 does; every side must be right. Two equations without names: by math-verify."""
    gold_sides, sides = ([side.strip() for side in split(text, _EQUALS)] for text in (gold, answer))
    named = _NAME.fullmatch(gold_sides[0]), _NAME.fullmatch(sides[0])
    if len(gold_sides) > 1 and len(sides) > 1:
        same = gold_sides[0] == sides[0]
        if all(named) and (same or not any(_LENGTH.fullmatch(s[0]) for s in (gold_sides, sides))):  # AB=2CD is CD=AB/2
            return same and all(_equal(gold_sides[-1], side) for side in sides[1:])
        return len(gold_sides) == len(sides) == 2 and _equal_values(gold, answer)
    if len(gold_sides) > 1:
        return bool(named[0]) and len(gold_sides) == 2 and _equal(gold_sides[1], answer)
    if named[1]:
        sides = sides[1:]
    elif _NAME.fullmatch(sides[-1]):
        sides = sides[:-1]
    return all(side and _equal(gold, side) for side in sides)


# -- intervals --------------------------------------------------------------------------------------------------------

_RELATION = re.compile(r"(<|>|\\[lg]e(?![A-Za-z]))")
_FLIPPED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}
_SETS = re.compile(r"\\(?:cup|cap|setminus|mathbb|backslash)(?![A-Za-z])")


class _Interval(NamedTuple):
    """Bounds and brackets as text; `variable` of an inequality."""

    left: str
    low: str
    high: str
    right: str
    variable: str | None = None

    def __str__(self) -> str:
        return f"{self.left}{self.low},{self.high}{self.right}"


def _interval(answer: str) -> _Interval | None:
    r"""0 < x \le 1, x > 1, x \in (0, 1] or (0, 1] as an interval; None for anything else."""
    if match := re.fullmatch(rf"({_VARIABLE})\s*\\in(?![A-Za-z])\s*(.*)", answer):
        inner = _interval(match[2])
        return inner and inner._replace(variable=match[1])
    parts = [part.strip() for part in _RELATION.split(answer)]
    is_variable = [re.fullmatch(_VARIABLE, part) is not None for part in parts]
    if len(parts) == 1:
        bracket = bracketed(answer)
        if bracket is None or bracket[0] == r"\{\}" or len(bracket[1]) != 2:
            return None
        return _Interval(bracket[0][0], *bracket[1], bracket[0][-1])
    if len(parts) == 3 and is_variable[0] != is_variable[2]:
        variable, relation, bound = parts if is_variable[0] else (parts[2], _FLIPPED[parts[1]], parts[0])
        if relation in ("<", r"\le"):
            return _Interval("(", r"-\infty", bound, ")" if relation == "<" else "]", variable)
        return _Interval("(" if relation == ">" else "[", bound, r"\infty", ")", variable)
    if len(parts) == 5 and is_variable[2]:
        low, first, variable, second, high = parts
        if first in (">", r"\ge"):
            low, first, second, high = high, _FLIPPED[second], _FLIPPED[first], low
        if {first, second} <= {"<", r"\le"}:
            return _Interval("(" if first == "<" else "[", low, high, ")" if second == "<" else "]", variable)
    return None


def _equal_intervals(gold: str, answer: str, a: _Interval | None, b: _Interval | None) -> bool:
    if a is None or b is None:
        return bool(_SETS.search(gold if a is None else answer)) and _equal_values(gold, answer)
    if a.variable and b.variable and a.variable != b.variable:
        return False
    return (a.left, a.right) == (b.left, b.right) and _equal(a.low, b.low) and _equal(a.high, b.high)


def _equal_unions(gold: str, answer: str) -> bool:
    """Whether "x<1 or x>3" and a union of intervals are equal, in any order."""
    sides = [[_interval(part) for part in split(text, ALTERNATIVE)] for text in (gold, answer)]
    names = [{part.variable for part in side if part and part.variable} for side in sides]
    if None in sides[0] + sides[1] or len(names[0] | names[1]) > 1:
        return False
    return _same_items(*([str(part) for part in side] for side in sides))


def _equal_relations(gold: str, answer: str, gold_items: list[str], answer_items: list[str]) -> bool:
    """Inequalities joined by "or", or by "and" or commas: the same ones in any order, or the interval or union."""
    if len(gold_items) > 1 and len(answer_items) > 1:
        same = bool(OR.search(gold)) == bool(OR.search(answer))
        return same and _same_items(gold_items, answer_items)
    if OR.search(gold) or OR.search(answer):
        return _equal_unions(gold, answer)
    sides = [_intersection(side) for side in (gold_items, answer_items)]
    return None not in sides and _equal_intervals(gold, answer, *sides)


def _intersection(parts: list[str]) -> _Interval | None:
    """The interval that one inequality describes, or two with one variable: a lower and an upper bound."""
    intervals = [_interval(part) for part in parts]
    if len(intervals) == 1 or None in intervals:
        return intervals[0]
    if len(intervals) > 2 or intervals[0].variable is None or intervals[0].variable != intervals[1].variable:
        return None
    low, high = intervals if intervals[0].high == r"\infty" else intervals[::-1]
    bounds_differ = low.high == r"\infty" and high.low == r"-\infty"
    return low._replace(high=high.high, right=high.right) if bounds_differ else None


# -- percent, units, values -------------------------------------------------------------------------------------------

_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*percent\s*\}|(?<=[0-9]) percent)$")


def _equal_percents(gold: str, answer: str) -> bool:
    """65% is 0.65. The response may leave the sign out where the gold answer is above 1%; it may not add one."""
    bare_gold, bare_answer = _PERCENT.sub("", gold), _PERCENT.sub("", answer)
    gold_percent, answer_percent = bare_gold != gold, bare_answer != answer
    if gold_percent == answer_percent:
        return _equal_quantities(bare_gold, bare_answer)
    if gold_percent:
        if any(quantity(text)[1] for text in (bare_gold, bare_answer)):
            return False
        if _NUMBER.fullmatch(bare_gold) and abs(float(bare_gold)) > 1 and _equal_values(bare_gold, bare_answer):
            return True
        return _equal_values(rf"\frac{{{bare_gold}}}{{100}}", bare_answer)
    return _equal_values(bare_gold, rf"\frac{{{bare_answer}}}{{100}}")


def _equal_quantities(gold: str, answer: str) -> bool:
    """A unit on one side only does not count; two units must be of one dimension and are converted."""
    (gold_value, gold_unit), (value, unit) = quantity(gold), quantity(answer)
    if unit and unit.letters and not (gold_unit and gold_unit.dimension == unit.dimension):
        return not gold_unit and _equal_values(gold, answer)
    if not gold_unit or not unit or gold_unit[:2] == unit[:2]:
        return _equal_values(gold_value, value)
    ratio = unit.factor / gold_unit.factor
    converted = rf"({value})\cdot\frac{{{ratio.numerator}}}{{{ratio.denominator}}}"
    return gold_unit.dimension == unit.dimension and _equal_values(gold_value, converted)


def _equal_values(gold: str, answer: str) -> bool:
    import sympy

    a, b = _parsed(gold), _parsed(answer)
    if a is None or b is None or isinstance(a, sympy.Expr) != isinstance(b, sympy.Expr):
        return False
    if not isinstance(a, sympy.Expr):
        return _verified(a, b)
    if a.free_symbols or b.free_symbols:
        return _equal_functions(a, b)
    pairs = ((answer, gold, a), (gold, answer, b))
    rounded = (_DECIMAL.fullmatch(text) and "." not in other and _rounds_to(v, text) for text, other, v in pairs)
    return any(rounded) or _equal_numbers(a, b)


def _is_time(match: re.Match) -> bool:
    """Whether a gold answer is a time of day and no ratio, which is in lowest terms."""
    hours, minutes, half = match.groups()
    return half is not None or minutes[0] == "0" or gcd(int(hours), int(minutes)) > 1


def _same_time(gold: re.Match, answer: re.Match | None) -> bool:
    if answer is None or (gold[3] and gold[3].lower() != (answer[3] or "").lower()):
        return False
    return (int(gold[1]), gold[2]) == (int(answer[1]), answer[2])


def _shares(ratio: list[str]) -> list[str]:
    """Every later part of a : b : c over the first."""
    return [rf"\frac{{{part}}}{{{ratio[0]}}}" for part in ratio[1:]]


def _verified(a: Any, b: Any) -> bool:
    """math-verify's own verdict, for sets, matrices, relations and unknown functions."""
    from math_verify import verify

    return bool(verify([a], [b], float_rounding=12, timeout_seconds=None))


def _rounds_to(value: Any, decimal: str) -> bool:
    """Whether `decimal`, of at least SIGNIFICANT_DIGITS, is `value` rounded to as many places."""
    digits, places = decimal.replace(".", "").lstrip("+-0"), len(decimal.partition(".")[2])
    if len(digits) < SIGNIFICANT_DIGITS or not value.is_extended_real or not value.is_finite:
        return False
    exact = Fraction(str(value.evalf(places + len(digits) + 10)))
    return abs(exact - Fraction(decimal)) <= Fraction(1, 2 * 10**places)


def _equal_numbers(a: Any, b: Any) -> bool:
    """Exactly equal where both are rational, else to DIGITS significant digits."""
    import sympy

    if any(number.has(sympy.nan, sympy.zoo) for number in (a, b)):  # 1/0
        return False
    if a.is_infinite or b.is_infinite:
        return bool(a == b)
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    a, b = a.evalf(DIGITS + 15), b.evalf(DIGITS + 15)
    if not (a.is_number and b.is_number) or a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
        return False
    return bool(abs(a - b) <= sympy.Float(f"1e-{DIGITS}", DIGITS + 15) * max(abs(a), abs(b)))


def _equal_functions(a: Any, b: Any) -> bool:
    """Whether two expressions agree at random points; math-verify's verdict where they have unknown functions.

    Points at which a power, logarithm or inverse trigonometric function in the gold value `a` is not real, as the root
    of a negative number, count only where fewer than FEWEST_POINTS others are left.
    """
    import sympy
    from sympy.core.function import AppliedUndef

    if a == b:
        return True
    if any(e.has(AppliedUndef, sympy.oo) for e in (a, b)):
        return _verified(a, b)
    symbols, random, compared = sorted(a.free_symbols | b.free_symbols, key=str), Random(0), 0
    real, equal = 0, True  # equal: at the other points
    parts = a.atoms(sympy.Pow, sympy.log, sympy.asin, sympy.acos, sympy.asec, sympy.acsc)  # not real everywhere
    for number in range(POINTS):
        least = -60 if number < POINTS // 2 else 1
        point = {symbol: sympy.Rational(random.randint(least, 60), random.randint(7, 13)) for symbol in symbols}
        values = a.subs(point), b.subs(point)
        if not any(value.has(sympy.nan, sympy.zoo) for value in values):
            compared += 1
            if any(part.subs(point).is_real is False for part in parts):
                equal = equal and _equal_numbers(*values)
            elif not _equal_numbers(*values):
                return False
            else:
                real += 1
    return real >= FEWEST_POINTS or (equal and compared >= FEWEST_POINTS)


_COMMANDS = """
frac sqrt cdot times div pi infty sum prod int lim to binom exp log ln max min gcd lcm vec hat mid begin end circ
sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan arccot arcsec arccsc lfloor rfloor lceil rceil
alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi
varphi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma Upsilon Phi Psi Omega
lt gt le ge ne in cup cap setminus backslash emptyset mathbb vert lvert rvert lbrace rbrace
""".split()
_NAMES = re.compile(r"_\{?\w+\}?|\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
_MISREAD = re.compile(
    r"[0-9)}]\s*(?:'|\\\{)|(?<![A-Za-z])[0-9.]+\s*_|[)]\s*_"  # 5', 5\{6\}, 5_{max}
    r"|^\[[^,]*\]$|(?<![0-9.])0\s*[A-Za-z]|\\vec\s*\{[^{}]*\}\s*\\(?:times|cdot)"  # [5], 0x10, products of vectors
    r"|\.[0-9]*\.|!\s*[!0-9]|\|\s*_"  # 1.2.3, 5!!, 5|_2
    r"|\\frac\s*\{\s*d\s*(?:\^\{?[0-9]\}?)?\s*[A-Za-z]|(?<![A-Za-z])d[a-z]\s*/\s*d[a-z]"  # derivatives
)
_DECIMALS = re.compile(r"(\^\s*)?(?:([0-9]*)\.([0-9]+)|([0-9]+)\.(?![0-9]))")


def _is_read(answer: str) -> bool:
    r"""Whether math-verify reads all of the answer; it drops \text{...}, primes of numbers and unknown commands."""
    if (
        answer.count("|") % 2
        or _MISREAD.search(answer)
        or any(name not in _COMMANDS for name in re.findall(r"\\([A-Za-z]+)", answer))
    ):
        return False
    return re.search("[A-Za-z]{4}", _NAMES.sub(" ", answer)) is None  # a word, not a product of letters


def _exact(match: re.Match[str]) -> str:
    """A decimal as a fraction, in braces behind ^."""
    whole, places = match[2] or match[4] or "0", match[3] or ""
    fraction = rf"(\frac{{{int(whole + places)}}}{{{10 ** len(places)}}})"
    return f"{match[1]}{{{fraction}}}" if match[1] else fraction


_CAPITALS = re.compile(r"(?<![A-Za-z\\{])(\\[A-Za-z]+)|([A-Z]+)(?![a-z])")
_DEGREES = re.compile(r"([0-9.]+)\s*\^\\circ")


@functools.lru_cache(maxsize=1024)  # a prompt's gold answer is parsed once per response
def _parsed(answer: str) -> Any:
    """The sympy object that math-verify reads, i as the imaginary unit; None where it reads none."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse

    if not _is_read(answer):
        return None
    answer = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", answer)
    # math-verify makes letters small: a capital, or several as one name, gets another name
    answer = _CAPITALS.sub(lambda m: m[1] or f"{m[2][0].lower()}_{{capital{m[2][1:]}}}", answer)
    answer = _DECIMALS.sub(_exact, answer)
    spellings = NormalizationConfig(True, units=False, malformed_operators=False, nits=True, boxed="all")
    config = (LatexExtractionConfig(boxed_match_priority=-1, normalization_config=spellings),)
    results = parse(f"${answer}$", config, fallback_mode="no_fallback", parsing_timeout=None)
    if not results or isinstance(results[0], str):
        return None
    value = results[0]
    if isinstance(value, sympy.Expr):
        given = {s: sympy.I if s.name == "i" else sympy.Symbol(s.name, real=True) for s in value.free_symbols}
        value = value.subs(given).doit()  # one symbol per name: with an i, math-verify's are not real
    return value
