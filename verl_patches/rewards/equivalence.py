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
from random import Random
from typing import Any, NamedTuple

from verl_patches.rewards.answer_text import (
    ALTERNATIVE,
    UNION,
    bracketed,
    deepest,
    has_adjacent_numbers,
    items,
    normalise,
    split,
)
from verl_patches.rewards.units import quantity

MAX_DEPTH = 12  # of brackets; ANTLR's time grows steeply with depth
MAX_ITEMS = 32  # of a list or set
SIGNIFICANT_DIGITS = 6  # fewest of a rounded decimal that equals an exact value
POINTS, FEWEST_POINTS = 12, 4  # at which functions are compared

_UNSAFE = re.compile(r"\$|\\[(\[]|\\$|(?i:answer)")  # math-verify would search inside the answer for another answer
_EQUALS = re.compile(r"(?<![<>!:])=")
_NAME = re.compile(r"(?:[A-Za-z](?:_\{?\w+\}?)?'*(?:\([A-Za-z0-9, ]+\))?|\\[A-Za-z]+|\\text\{[^{}]*\})")
_VARIABLE = r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|theta|lambda|mu|phi|omega))(?:_\{?\w+\}?)?"
_IN_SET = re.compile(rf"^{_VARIABLE}\s*\\in(?![A-Za-z])\s*(?=\\\{{[^\\]*\\\}}$)")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)")


def equivalent(gold: str, answer: str) -> bool:
    """Whether `answer` equals `gold`; both are LaTeX or plain text without a box around them."""
    gold, answer = normalise(gold), normalise(answer)
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    if _UNSAFE.search(answer) or has_adjacent_numbers(answer) or deepest(answer) > MAX_DEPTH:
        return False
    if has_adjacent_numbers(gold):  # read by nobody in one way: equal as text only
        return False
    return _equal(gold, answer)


def _equal(gold: str, answer: str) -> bool:
    gold, answer = (_IN_SET.sub("", text.strip()) for text in (gold, answer))
    if not gold or not answer:
        return False
    words = _words(gold), _words(answer)
    if words != (None, None):
        return words[0] == words[1]
    bases = _in_base(gold), _in_base(answer)
    if bases != (None, None):
        return bases[0] == bases[1]
    lists = items(gold), items(answer)
    if max(map(len, lists)) > 1:
        return _equal_lists(gold, answer, *lists) or _equal_unions(gold, answer)
    if _EQUALS.search(gold) or _EQUALS.search(answer):
        return _equal_equations(gold, answer)
    intervals = _interval(gold), _interval(answer)
    if intervals != (None, None):
        return _equal_intervals(gold, answer, *intervals)
    if UNION.search(gold) or UNION.search(answer):
        return _equal_unions(gold, answer) or _equal_values(gold, answer)
    brackets = bracketed(gold), bracketed(answer)
    if None not in brackets:
        return _equal_brackets(*brackets)
    return _equal_percents(gold, answer)


# -- words and bases --------------------------------------------------------------------------------------------------

_TEXT = re.compile(r"\\text\{([^{}]*)\}|([A-Za-z][A-Za-z .'-]*)")
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
        if len(dict(gold_names)) < len(gold_names):  # x=1, x=2
            return _same_items([f"{k}={v}" for k, v in gold_names], [f"{k}={v}" for k, v in names])
        values = dict(names)
        return values.keys() == dict(gold_names).keys() and all(_equal(v, values[k]) for k, v in gold_names)
    if pairs := gold_names or names:
        values = [value for _, value in pairs]
        gold_items, answer_items = (values, answer_items) if gold_names else (gold_items, values)
        if len(dict(pairs)) == len(pairs):
            return all(map(_equal, gold_items, answer_items))
    return _same_items(gold_items, answer_items)


def _named(parts: list[str]) -> list[tuple[str, str]] | None:
    """[(name, value)] of a list in which every item is name = value; None for any other."""
    pairs = [tuple(side.strip() for side in _EQUALS.split(part)) for part in parts]
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
    gold_sides, sides = ([side.strip() for side in _EQUALS.split(text)] for text in (gold, answer))
    named = _NAME.fullmatch(gold_sides[0]), _NAME.fullmatch(sides[0])
    if len(gold_sides) > 1 and len(sides) > 1:
        if all(named):
            return gold_sides[0] == sides[0] and all(_equal(gold_sides[-1], side) for side in sides[1:])
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
    return None not in sides[0] + sides[1] and _same_items(*([str(part) for part in side] for side in sides))


# -- percent, units, values -------------------------------------------------------------------------------------------

_PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*percent\s*\}|(?<=[0-9]) percent)$")


def _equal_percents(gold: str, answer: str) -> bool:
    """A percent sign on one side only does not count for numbers above 1; it does for fractions of one."""
    bare_gold, bare_answer = _PERCENT.sub("", gold), _PERCENT.sub("", answer)
    gold_percent, answer_percent = bare_gold != gold, bare_answer != answer
    if gold_percent == answer_percent:
        return _equal_quantities(bare_gold, bare_answer)
    if _NUMBER.fullmatch(bare_gold) and abs(float(bare_gold)) > 1 and _equal_values(bare_gold, bare_answer):
        return True
    if gold_percent:
        return _equal_values(rf"\frac{{{bare_gold}}}{{100}}", bare_answer)
    return _equal_values(bare_gold, rf"\frac{{{bare_answer}}}{{100}}")


def _equal_quantities(gold: str, answer: str) -> bool:
    """A unit on one side only does not count; two units must be of one dimension and are converted."""
    (gold_value, gold_unit), (value, unit) = quantity(gold), quantity(answer)
    if not gold_unit or not unit or gold_unit == unit:
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
    rounded = any(_DECIMAL.fullmatch(text) and _rounds_to(v, text) for text, v in ((answer, a), (gold, b)))
    return rounded or _equal_numbers(a, b)


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
    """Exactly equal where both are rational, else to 25 significant digits, or to 9 if one has decimals in it."""
    import sympy

    if a.is_infinite or b.is_infinite:
        return bool(a == b)
    a, b = (sympy.Rational(str(v)) if isinstance(v, sympy.Float) else v for v in (a, b))
    if a.is_Rational and b.is_Rational:
        return bool(a == b)
    digits = 9 if a.has(sympy.Float) or b.has(sympy.Float) else 25
    a, b = a.evalf(40), b.evalf(40)
    if not (a.is_number and b.is_number) or a.has(sympy.nan, sympy.zoo) or b.has(sympy.nan, sympy.zoo):
        return False
    return bool(abs(a - b) <= sympy.Float(f"1e-{digits}", 40) * max(abs(a), abs(b)))


def _equal_functions(a: Any, b: Any) -> bool:
    """Whether two expressions agree at random points; math-verify's verdict where they have unknown functions."""
    import sympy
    from sympy.core.function import AppliedUndef

    if a == b:
        return True
    if any(e.has(AppliedUndef, sympy.oo) for e in (a, b)):
        return _verified(a, b)
    symbols, random, compared = sorted(a.free_symbols | b.free_symbols, key=str), Random(0), 0
    for _ in range(POINTS):
        point = {symbol: sympy.Rational(random.randint(-60, 60), random.randint(7, 13)) for symbol in symbols}
        values = a.subs(point), b.subs(point)
        if not any(value.has(sympy.nan, sympy.zoo) for value in values):
            compared += 1
            if not _equal_numbers(*values):
                return False
    return compared >= FEWEST_POINTS


_CAPITALS = re.compile(r"(?<![A-Za-z\\{])(\\[A-Za-z]+)|([A-Z]+)(?![a-z])")
_DEGREES = re.compile(r"([0-9.]+)\s*\^\\circ")


@functools.lru_cache(maxsize=1024)  # a prompt's gold answer is parsed once per response
def _parsed(answer: str) -> Any:
    """The sympy object that math-verify reads, i as the imaginary unit; None where it reads none."""
    import sympy
    from math_verify import LatexExtractionConfig, parse

    answer = _DEGREES.sub(r"(\\frac{\1\\pi}{180})", answer)
    # math-verify makes letters small: a capital, or several as one name, gets another name
    answer = _CAPITALS.sub(lambda m: m[1] or f"{m[2][0].lower()}_{{capital{m[2][1:]}}}", answer)
    config = (LatexExtractionConfig(boxed_match_priority=-1),)
    results = parse(f"${answer}$", config, fallback_mode="no_fallback", parsing_timeout=None)
    if not results or isinstance(results[0], str):
        return None
    value = results[0]
    if isinstance(value, sympy.Expr):
        value = value.subs({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"}).doit()
    return value
