r"""Decide whether two answers are equal. docs/reward.md lists the rules, with examples.

Answers are brought into one spelling and split into items, names and units; math-verify compares the remaining
values. An answer that it would misread or read only in part (5_{max}, 5\quad 6, 2^3^2) equals only its own text. A
comparison may never end (10^{10^{10}}), so maths.py makes it in a process with limits.
"""

from __future__ import annotations

import contextlib
import functools
import re
import unicodedata
from random import Random
from typing import Any

import sympy
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
from math_verify import verify

DIGITS = 200  # significant digits in which two irrational numbers must agree
POINTS, FEWEST_POINTS = 24, 4  # points to compare functions at, the second half positive; how many must be usable

_HAN = "\u4e00-\u9fff"  # Chinese characters
_FUNCTIONS = "arcsin|arccos|arctan|arccot|arcsec|arccsc|sinh|cosh|tanh|coth|sin|cos|tan|cot|sec|csc|log|ln|exp"
# text in braces, nested up to four deep; a command or character that is an argument without braces
_BRACES = r"\{(?:[^{}]|\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\})*\}"
_BARE_TOKEN = rf"(\\sqrt{_BRACES}|\\(?!(?:frac|binom|sqrt|text)\b)[A-Za-z]+|[0-9A-Za-z])"
# each entry: the spelling that comparisons use, then those that it replaces ("_" stands for a space)
_SYNONYM_TABLE = r"""
\le ≤ ≦ ⩽ <= \leq \leqslant   \ge ≥ ≧ ⩾ >= \geq \geqslant   \ne ≠ != \neq   < \lt   > \gt   = ∈ \in   \notin ∉
( \langle   ) \rangle   \{ ｛ \lbrace   \} ｝ \rbrace   | \mid \vert \lvert \rvert   \cup ∪ \lor ∨ \vee 或   \land ∧
\pm ± +/-   \mp ∓   \times ×   \cdot ·   - − –   / ∕   : ∶   , 、 和 与 及 且   . 。   ... … \ldots   ' ’ \prime
\pi π   \infty ∞   \circ ° º ˚ \degree   \emptyset ∅ \varnothing   \mathbb{R} ℝ   \sqrt √   \sqrt[3] ∛   \sqrt[4] ∜
\frac \dfrac \tfrac \cfrac   \binom \dbinom \tbinom   _ \quad \qquad \, \; \: \! ~   \approx ≈
\text \mathrm \mathbf \textrm \textbf \textit \mbox \operatorname \boldsymbol \underline
"""
_SPELLINGS = dict.fromkeys(map("\\{}".format, "left right big bigl bigr Big Bigl Bigr displaystyle limits".split()), "")
for _first, *_others in map(str.split, re.split(" {3}|\n", _SYNONYM_TABLE.strip())):
    _end = " " if _first[-1].isalpha() else ""  # a letter that follows is no part of the command
    _SPELLINGS |= dict.fromkeys(_others, _first.replace("_", " ") + _end)
_MONEY_AMOUNT = r"(\.?[0-9](?:[0-9.,]*[0-9])?)"
_REWRITE_RULES = (  # (pattern, replacement), applied in this order: later rules read what earlier ones wrote
    ("([⁰ⁱ¹²³⁴-ⁿ]+)", r"^{\1}"),
    ("([₀-₎]+)", r"_{\1}"),
    ("([¼-¾⅐-⅞])", r" \1"),
    # wide and mathematical letters; not digits in circles, which name choices
    ("[²³¹¼-¾⁰-₎⅐-⅞！-ｚ￠-￦℃℉㎀-㏟\U0001d400-\U0001d7ff]", lambda m: unicodedata.normalize("NFKC", m[0])),
    (r"([√∛∜])\s*([0-9.]+)", r"\1{\2}"),
    (r"(?<=[0-9])(?:\\,|\\!|\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))", ""),  # marks of thousands
    (r"(?<!\\)\\ |\\hspace\*?\{[^{}]*\}", " "),
    (r"\\[A-Za-z]+|\\.|[<>!]=|\+/-|.", lambda m: _SPELLINGS.get(m[0], m[0])),
    # money: the sign moves behind the amount, as a unit
    (r"(?:^|(?<=[ ,;=<>(-]))(?:US ?)?\\?\$(?= ?\.?[0-9])|(?<=[0-9])\$$", r"\\$"),
    (rf"(\\\$|[£€¥])\s*{_MONEY_AMOUNT}\s*((?:thousand|[mb]illion)?)", r"\2\\text{\3 \1}"),
    (rf"{_MONEY_AMOUNT}\s*(\\\$|[£€¥])(?!\}})", r"\1\\text{\2}"),
    # text, and words that stand for a sign
    (r"\\text\s*\{\s*", r"\\text{"),
    (rf"\\text\{{({_FUNCTIONS})\s*\}}", r"\\\1 "),
    (r",?\s*(?:\\text\{,?\s*and\s*\}|(?<![A-Za-z])and(?![A-Za-z]))", ","),
    (r",?\s*(?:\\text\{,?\s*or\s*\}|(?<![A-Za-z])or(?![A-Za-z]))", r"\\cup "),
    (r"^\\text\{([A-Za-z]|[+-]?[0-9][0-9.,/]*)\}$", r"\1"),
    (rf"(?<![A-Za-z\\])(pi(?![A-Za-z])|(?:sqrt|{_FUNCTIONS})(?=\s*[\^_(\\0-9]|\s+[a-z](?![A-Za-z])))", r"\\\1 "),
    (r"^(?:\\text\{)?[Nn]o (?:real )?solutions?\}?$|\\\{\s*\\\}", r"\\emptyset"),
    (r"(?:\\text\{)?([+-]?)(?<![A-Za-z\\])infinity(?![A-Za-z])\}?", r"\1\\infty"),
    (rf"(\\text\{{[^{{}}]*\}})|([{_HAN}][{_HAN}/]*)", lambda m: m[1] or rf"\text{{{m[2]}}}"),
    # relations, sets, degrees, primes, logarithms
    (r"\\not\s*(?:=|\{=\})", r"\\ne "),
    (r"^\\approx(?![A-Za-z])", ""),
    (r"^\\\{\s*([A-Za-z])\s*(?:=\s*\\mathbb\s*\{?R\}?)?\s*[|:]([^{}|]*\1[^{}|]*)\\\}$", r"\2"),  # {x | x > 1}
    (r"\\mathbb\s*\{?R\}?$", r"(-\\infty,\\infty)"),
    (r"(?<=[0-9}])(?:\\text\{度\}|\s*\\circ)|\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}", r"^{\\circ}"),
    (r"\^\{\\circ\}\s*(?:\\text\{)?([CF])(?![A-Za-z])\}?", r"\\text{degrees\1}"),
    (r"\^\s*\{\s*('+)\s*\}|\^\s*('+)", r"\1\2"),
    (r"\\lg(?![A-Za-z]|\s*_)", r"\\log_{10} "),
    # numbers: 1⁄2, 1 1/2, 1.2e3, 0.333..., 0.\overline{3}, 1010_2, 6:00, 1:2, 1:2:3, 1,000
    (r"([0-9]+)⁄([0-9]+)", r"\\frac{\1}{\2}"),
    (r"([0-9]) ([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}"),
    (r"(?<![A-Za-z0-9_.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![0-9A-Za-z.])", r"\1\\cdot 10^{\2}"),
    (r"\.([0-9])\1\1+\s*\.\.\.$", r".\\bar{\1}"),
    (r"([0-9]*)\.\\(?:overline|bar|dot)\s*\{?([0-9])\}?(?![0-9}])", r"(0\1+\\frac{\2}{9})"),
    (r"([0-9]*)\.\\(?:overline|bar)\s*\{([0-9][0-9])\}", r"(0\1+\\frac{\2}{99})"),
    (r"^\(?0*([0-9A-F]+)\)?_\{?\s*([0-9]+)\s*\}?$", r"\1_{\2}"),
    (r"^0?([0-9]|1[0-9]|2[0-4]):([0-5][0-9])\s*(?:\\text\{)?([AaPp]?)\.?(?:[Mm]\.?)?\}?$", r"\\text{\1:\2h\3}"),
    (r"^([^:{}]+):([^:{}]+)$", r"(\1)/(\2)"),
    (r"^([^:{}]+):([^:{}]+):([^:{}]+)$", r"((\1)/(\2),(\2)/(\3))"),
    (r"(?<![0-9,.(\[{])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,)\]}])", lambda m: m[0].replace(",", "")),
)
_BRACE_RULES = (  # arguments without braces -> with them
    (r"([\^_]|\\(?:sqrt|frac|binom))\s+", r"\1"),
    (rf"\\sqrt(\[[^\]]*\])?\s*(?:{_BARE_TOKEN}|\(([^()]*)\))", r"\\sqrt\1{\2\3}"),
    (rf"\\(frac|binom)({_BRACES})?\s*{_BARE_TOKEN}", r"\\\1\2{\3}"),
    (rf"\\({_FUNCTIONS})\s*([\^_])([0-9A-Za-z])", r"\\\1\2{\3}"),
    (rf"([\^_])(\\frac{_BRACES}{_BRACES}|-?[0-9]+(?:\.[0-9]+)?|-?{_BARE_TOKEN}|-?\([^()]*\))", r"\1{\2}"),
)
_PLAIN_WORD = re.compile(
    r"\\text\{([^{}]*[A-Za-z][^{}]*)\}|([A-Za-z][A-Za-z .'-]{3,}|[A-Z]{2,}|\(?[A-Z]\)|[Yy]es|[Nn]o)"
)


def _normalise(answer: str) -> str:
    """Return the answer in one spelling, without formula delimiters, meaningless spaces and a final full stop."""
    while match := re.fullmatch(r"\s*(?:\$\$?|\\\(|\\\[)((?:\\\$|[^$])*?)(?:\$\$?|\\\)|\\\])\s*", answer):
        answer = match[1]
    for pattern, spelling in _REWRITE_RULES:
        answer = re.sub(pattern, spelling, " ".join(answer.split()))
    for pattern, spelling in _BRACE_RULES * 4:  # arguments nest
        answer = re.sub(pattern, spelling, answer)
    answer = re.sub("(?<![0-9A-Za-z.]) | (?![0-9A-Za-z.])", "", " ".join(answer.split()).removesuffix("."))
    if word := _PLAIN_WORD.fullmatch(answer):
        answer = (word[1] or word[2]).strip(" .()")
        answer = answer.lower() if len(answer) > 3 or answer in ("Yes", "No") else answer
        return answer if len(answer) == 1 else rf"\text{{{answer}}}"
    return answer[1:-1] if re.fullmatch(_BRACES, answer) else answer


_GREEK = (
    "alpha beta delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau upsilon phi "
    "varphi chi psi omega Delta Theta Lambda Xi Sigma Upsilon Phi Psi Omega"
)
_NAMED_VALUE = re.compile(
    rf"((?:[A-Za-z]|\\(?:{_GREEK.replace(' ', '|')}|max|min)|[fgh]\^\{{-1\}})(?:_\{{\w+\}})?'*(?:\(-?\w+(?:,-?\w+)*\))?"
    r"|\([a-z](?:,[a-z])+\)|[A-Z]{2,3}|\|[a-wz]\||m?\\angle [A-Z]{1,3}|\[[A-Z]{3,}\]"
    r"|\\text\{(?![^{}]*\b(?:not|no|never)\b)[^{}]*\})=(.+)"
)
_LIST_TOKEN = re.compile(r"(?P<item>[,;]|\\cup(?![A-Za-z]))|[(\[{]|[)\]}]")


def equivalent(gold: str, answer: str) -> bool:
    """Return whether `answer` equals `gold`; both are LaTeX or plain text without a box around them."""
    gold, answer = _normalise(gold), _normalise(answer)
    return bool(gold and answer) and _equal_lists(gold, answer)


def _equal_lists(gold: str, answer: str) -> bool:
    """Return whether lists are equal, in any order.

    The order must be the same if only one side names its values (x = 1, y = 2).
    """
    golds, answers = _split_items(gold), _split_items(answer)
    if gold == answer or len(golds) != len(answers):
        return gold == answer
    if len(golds) == 1:
        return _equal_named(golds[0], answers[0])
    # inequalities: "x > 1 and x < 2" is not "x > 1 or x < 2"; with several variables only equal texts are equal
    if re.search(r"[<>]|\\[lg]e(?![A-Za-z])", gold + answer):
        if (r"\cup" in gold) != (r"\cup" in answer) or len(set(re.findall(r"\b[A-Za-z]\b", gold + answer))) > 1:
            return False
    if ("=" in golds[0]) != ("=" in answers[0]):
        return all(map(_equal_named, golds, answers))
    for item in golds:
        equal = next((other for other in answers if _equal_named(item, other)), None)
        if equal is None:
            return False
        answers.remove(equal)
    return True


def _split_items(text: str) -> list[str]:
    r"""Return the items of a list or of a set; one with a single \pm is two items."""
    if re.fullmatch(r"\\\{[^{}]*(?:,|\\pm)[^{}]*\\\}", text):
        text = text[2:-2]
    items, start, level = [], 0, 0
    for match in _LIST_TOKEN.finditer(text + ","):
        if match["item"] is None:
            level += 1 if match[0] in "([{" else -1
        elif level == 0:
            item = text[start : match.start()].strip()
            if item.count(r"\pm") <= 1 and re.search(r"\\[pm][pm]", item):
                items += [item.replace(r"\pm", a).replace(r"\mp", b) for a, b in ("+-", "-+")]
            else:
                items.append(item)
            start = match.end()
    return items if level == 0 else [text]


def _equal_named(gold: str, answer: str) -> bool:
    """Return whether two items are equal; x = 5 equals 5."""
    name, other = _NAMED_VALUE.fullmatch(gold), _NAMED_VALUE.fullmatch(answer)
    if name and other and name[1] != other[1]:
        return False
    if name or other:
        return _equal_lists(name[2] if name else gold, other[2] if other else answer)
    return _equal_quantities(gold, answer)


_SCALES = {"thousand": 3, "million": 6, "billion": 9, "千": 3, "万": 4, "亿": 8, "percent": -2, "%": -2, r"\%": -2}
_SCALE_WORD = re.compile("|".join(map(re.escape, _SCALES)).replace("千", "千(?![米克])"))
_UNIT_TABLE = r"""
m meter metre 米 = m; cm centimeter centimetre 厘米 = m/100; mm millimeter millimetre 毫米 = m/1000; dm 分米 = m/10
km kilometer kilometre 千米 公里 = 1000*m; in inch inche 英寸 = 0.0254*m; ft foot feet 英尺 = 0.3048*m
yd yard = 0.9144*m; mi mile 英里 = 1609.344*m; s sec second 秒 = s; min minute 分钟 = 60*s; h hr hour 小时 = 3600*s
mph = 0.44704*m/s; day 天 = 86400*s; week 周 = 604800*s; month 月 个月 = month; year 年 = 12*month; g gram 克 = g
mg 毫克 = g/1000; kg kilogram 千克 公斤 = 1000*g; lb pound 磅 = 453.59237*g; oz ounce = 28.349523125*g
l L liter litre 升 = m**3/1000; ml mL milliliter millilitre 毫升 = m**3/10**6
degree \circ 度 = turn/360; degreesC 摄氏度 = celsius; degreesF = fahrenheit; dollar \$ 美元 = dollar
cent 美分 = dollar/100; yuan ¥ 元 人民币 = yuan; 角 = yuan/10; euro € 欧元 = euro; £ 英镑 = pound
apple = apple; unit way 个 只 = unit; 岁 = age; people person student child children 人 名 = person
"""
_UNITS = {
    name: sympy.sympify(value, rational=True)
    for names, value in (entry.split(" = ") for entry in re.split("; |\n", _UNIT_TABLE.strip()))
    for name in names.split()
}
_QUANTITY = re.compile(  # value and unit, which outside of \text{} must follow a number
    r"(?!.*\\(?:sin|cos|tan|cot|sec|csc)\b.*\\circ\}$)(.*[0-9)}]|.*\\pi)(\\text\{[^{}]*\}(?:\^\{[23]\})?|\^\{\\circ\}|\\?%)"
    r"|(-?[^A-Za-z+-]*[0-9)}]) ?([A-Za-z][A-Za-z/ .]*(?:\^\{[23]\}|[23])?)"
)
_UNIT_POWERS = {"square": 2, "sq": 2, "平方": 2, "cubic": 3, "立方": 3}
_UNIT_PART = re.compile(rf"({'|'.join(_UNIT_POWERS)}|)(\\?[A-Za-z$]+|[£€¥]|[{_HAN}]+)([23]?)")


def _split_quantity(text: str) -> tuple[str, Any]:
    """Return (value, unit) of an item, with % and scale words as factors of the value; (text, None) if without unit."""
    match = _QUANTITY.fullmatch(text)
    if not match:
        return text, None
    value, names = match[1] or match[3], re.sub(r"\\text|[{}. ^]", "", match[2] or match[4])
    if scale := _SCALE_WORD.match(names):
        value, names = rf"({value})\cdot 10^{{{_SCALES[scale[0]]}}}", names[scale.end() :]
    unit = None
    for number, part in enumerate(re.split(r"/|每|(?<=[a-z])per(?=[a-z])", names) if names else ()):
        found = _UNIT_PART.fullmatch(part)
        if not found or number > 1:
            return text, None
        known = _UNITS.get(found[2])
        if known is None and len(found[2]) > 2:
            known = _UNITS.get(found[2].removesuffix("s"))
        if known is None:
            return text, None
        unit = (unit or 1) * known ** ((-1) ** number * int(found[3] or _UNIT_POWERS.get(found[1], 1)))
    return value, unit


def _equal_quantities(gold: str, answer: str) -> bool:
    """Return whether two items are equal; a unit on one side is ignored; a response may leave out the sign of 65%."""
    if (percent := re.fullmatch(r"((?:[2-9]|1[0-9.])[0-9.]*)\\?%", gold)) and _equal_values(percent[1], answer):
        return True
    (gold_value, gold_unit), (value, unit) = _split_quantity(gold), _split_quantity(answer)
    if gold_unit and unit:
        ratio = unit / gold_unit
        return bool(ratio.is_Rational) and _equal_values(gold_value, rf"({value})\cdot({ratio})")
    if unit and re.search(r"(?<![A-Za-z\\])[A-Za-z](?:\^\{.\})?$", answer):  # one letter may be a variable
        return _equal_values(gold, answer)
    return _equal_values(gold_value, value)


def _equal_values(gold: str, answer: str) -> bool:
    a, b = _parse_value(gold), _parse_value(answer)
    if a is None or b is None or ("," in gold and "," in answer and (gold[0], gold[-1]) != (answer[0], answer[-1])):
        return False
    if isinstance(a, sympy.Expr) and isinstance(b, sympy.Expr) and (a.free_symbols or b.free_symbols):
        return _equal_functions(a, b)
    return verify([a], [b], numeric_precision=DIGITS, allow_set_relation_comp=True, timeout_seconds=None)


def _equal_functions(a: Any, b: Any) -> bool:
    """Return whether expressions are equal at random points where every power, root and logarithm of `a` is real."""
    symbols, random, compared = sorted(a.free_symbols | b.free_symbols, key=str), Random(0), 0
    parts = a.atoms(sympy.Pow, sympy.log, sympy.asin, sympy.acos, sympy.asec, sympy.acsc)  # not real everywhere
    for number in range(POINTS):
        least = -60 if number < POINTS // 2 else 1
        point = {symbol: sympy.Rational(random.randint(least, 60), random.randint(7, 61)) for symbol in symbols}
        difference = (a - b).subs(point)
        if not any(part.subs(point).is_real is False for part in parts) and not difference.has(sympy.nan, sympy.zoo):
            if difference.evalf(DIGITS, chop=True) != 0:
                return False
            compared += 1
    return compared >= FEWEST_POINTS or a == b


# commands that math-verify reads
_COMMANDS = {*f"frac sqrt cdot times div pi infty binom le ge lfloor rfloor {_GREEK}".split(), *_FUNCTIONS.split("|")}
# functions with a power or an index, and letters with an index: math-verify reads them
_SCRIPTED_NAME = re.compile(rf"(\\(?:{_FUNCTIONS}))(?:[\^_]\{{-?\w+\}})+|((?<![A-Za-z])[A-Za-z]|\\[A-Za-z]+)_\{{\w+\}}")
_MISREAD_TEXT = re.compile(
    r"[0-9.]\s+[.0-9]|[)}!|]\s*[0-9]|[0-9)!|]\{|\}\^|\.[0-9]*\.|!!"  # 5 6, (5)6, 5{6}, 2^3^2, 1.2.3, 5!!
    r"|(?<![0-9.])0\s*[A-Za-z]|\^\{T\}|[fghFGH]\^\{-1\}"  # 0x10, a transposed letter, an inverse function
    r"|\\frac\{d[^{}]*\}\{d|(?<![A-Za-z])d[A-Za-z]/d[A-Za-z]|(?<![A-Za-z\\])[A-Za-z]{4}"  # derivatives, a word
    r"|[^0-9A-Za-z.+*/()|!{},<>\[\]^\\\s-]|\\[^A-Za-z]|^\[[^,]*\]$"
)
_EXACT_VALUE_RULES = (  # decimals become fractions, products get their sign
    (r"(?<![0-9.])([0-9]+)\s*(\\frac\{[0-9]+\}\{[0-9]+\})", r"(\1+\2)"),  # a mixed number
    (r"([0-9]*)\.([0-9]*)", lambda m: rf"(\frac{{{int(m[1] + m[2])}}}{{{10 ** len(m[2])}}})"),
    (rf"([0-9)]|\\pi|\\(?:frac|binom){_BRACES}{_BRACES})\s*(?=\(|\\frac|\\binom)", r"\1\\cdot "),
)


@functools.lru_cache(maxsize=1024)  # the same gold answer comes with each response to a prompt
def _parse_value(text: str) -> Any:
    """Return the sympy object of the whole text, with i as the imaginary unit; None if math-verify misreads it."""
    text = re.sub(r"([0-9.]+)\^\{\\circ\}", r"(\\frac{\1\\pi}{180})", text)
    commands = re.findall(r"\\([A-Za-z]+)", text)
    odd_groups = text.count("}{") > commands.count("frac") + commands.count("binom") or text.count("|") % 2
    if odd_groups or not _COMMANDS.issuperset(commands) or _MISREAD_TEXT.search(_SCRIPTED_NAME.sub(r"\1\2 ", text)):
        return None
    for pattern, spelling in _EXACT_VALUE_RULES:
        text = re.sub(pattern, spelling, text)
    config = ConversionConfig(lowercase_symbols=False)
    with contextlib.suppress(Exception):  # the parser raises the base class
        value = latex2sympy(text, is_real=True, normalization_config=None, conversion_config=config)
        return value.subs(sympy.Symbol("i", real=True), sympy.I).doit()
    return None
