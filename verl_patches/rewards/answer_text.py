r"""Answers as text: one spelling for what LaTeX writes in several ways, and where lists and brackets end.

No meaning is computed here; equivalence.py compares the normalised texts.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from fractions import Fraction

from verl_patches.rewards.tex import FUNCTIONS, TEXTS, TexError, braced
from verl_patches.rewards.units import HAN

_SIGNS = {"×": "times", "π": "pi", "∞": "infty", "∪": "cup", "≤": "le", "≥": "ge", "≠": "ne", "∅": "emptyset"}
_SIGNS |= {"°": "circ", "º": "circ", "≈": "approx", "·": "cdot", "∈": "in", "±": "pm", "∓": "mp", "∉": "notin"}
_SIGNS |= {"≦": "le", "⩽": "le", "≧": "ge", "⩾": "ge", "∧": "land", "∨": "lor"}
_SIGNS |= {"｛": "{", "｝": "}", "＼": "backslash"}
_UNICODE = str.maketrans("−–÷’⁄∕∶、", "--/'//:,") | {ord(sign): f"\\{command} " for sign, command in _SIGNS.items()}
_UNICODE |= {ord("。"): ". ", ord("…"): "...", ord("℃"): r"\circ C", ord("℉"): r"\circ F"}
_DELIMITERS = re.compile(r"^(?:\$\$(.*)(?<!\\)\$\$|\$(.*)(?<!\\)\$|\\\((.*)\\\)|\\\[(.*)\\\])$")
_IDLE = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle|limits|nolimits)(?![A-Za-z])")


def _names(match: re.Match[str]) -> str:
    """(x, y) = without spaces."""
    return f"({','.join(filter(None, match.groups()))})="


_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        # commands without a meaning of their own, or with the meaning of another one
        (r"\\(?:mathbf|mathit|boldsymbol)\s*\{([A-Za-z])\}", r"\1"),
        (rf"\\(?:{'|'.join(TEXTS[1:])})\b\s*\{{", r"\\text{"),
        (rf"\\text\{{\s*({'|'.join(FUNCTIONS)})\s*\}}", r"\\\1 "),
        (r"\\lg(?![A-Za-z])(?!\s*_)", r"\\log_{10} "),
        (r"\\text\{\s*,?\s*(and|or)\s*\}", r" \1 "),
        (r"^\s*\\(?:text|boldsymbol|bm|underline)\s*\{\s*([+-]?[0-9][0-9.,/]*)\s*\}\s*$", r"\1"),
        (r"^\(\s*([A-Za-z])\s*,\s*([A-Za-z])\s*(?:,\s*([A-Za-z])\s*)?\)\s*=", _names),
        (r"^\(([0-9A-Fa-f]+)\)_", r"\1_"),
        (r"(?<![A-Za-z\\])([fghFGH])\s*\^\s*\{\s*-\s*1\s*\}", r"\1_{inverse}"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geq|geqslant)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\neq(?![A-Za-z])|!=|\\(?:not|cancel)\{\s*=\s*\}", r"\\ne "),
        (r"\+/-", r"\\pm "),
        (r"\\lt(?![A-Za-z])", "<"),
        (r"\\gt(?![A-Za-z])", ">"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"^\s*\\(?:approx|simeq|doteq)(?![A-Za-z])", ""),
        # spaces
        (r"(?<=[0-9])(?:\\,|\\!|\{,\}|,\\!)(?=[0-9]{3}(?![0-9]))", ""),  # marks of thousands
        (r"(?<!\\)\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\\(?:en|thin|med|thick)space(?![A-Za-z])", " "),
        (r"\\hspace\*?\{[^{}]*\}", " "),
        # words with a sign of their own
        (r"^\s*(?:\\text\{\s*)?[Nn]o (?:real )?solutions?\s*\}?\s*$|\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\\{\s*\\\}", r"\\emptyset"),
        (r"\\text\{\s*([+-]?)\s*infinity\s*\}|(?<![A-Za-z\\])infinity(?![A-Za-z])", r"\1\\infty"),
        (r"\\mathbb\s*\{?R\}?$", r"(-\\infty,\\infty)"),
        # degrees, primes
        (r"\^\s*\{?\s*(?:\\circ|\\degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"(?<=[0-9])\s*\\circ(?![A-Za-z])", r"^\\circ "),
        (r"\^\\circ\s*(?:\\text\{\s*C\s*\}|C(?![A-Za-z]))", r"\\text{celsius}"),
        (r"\^\\circ\s*(?:\\text\{\s*F\s*\}|F(?![A-Za-z]))", r"\\text{fahrenheit}"),
        (r"\\prime(?![A-Za-z])", "'"),
        (r"\^\s*\{\s*('+)\s*\}|\^\s*('+)", r"\1\2"),
        # numbers: 1 1/2, 1.2e3, 0.333...
        (r"([0-9]) ([0-9]+)/([0-9]+)", r"\1\\frac{\2}{\3}"),
        (r"(?<![A-Za-z0-9_.])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![0-9A-Za-z.])", r"\1\\cdot 10^{\2}"),
        (r"([0-9]*\.[0-9]*?)([0-9])\2\2+\s*(?:\.\.\.|\\[lc]?dots)$", r"\1\\overline{\2}"),
        (r"\\dot\s*\{?([0-9])\}?$", r"\\overline{\1}"),
    )
]
_PRODUCT = re.compile(r"(?<=[0-9])\s*\(|\)\s*\(")  # 2(3), which math-verify reads as a mixed number
_PRIMED = re.compile(r"([A-Za-z])('+)")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{([0-9]+)\}")
_THOUSANDS = re.compile(r"(?<![0-9,.])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])")


def normalise(answer: str) -> str:
    """The answer without outer math delimiters, marks of thousands, spacing and a final full stop, in one spelling.

    Empty where the answer is no TeX.
    """
    answer = " ".join(_latex(answer).split())
    while match := _DELIMITERS.match(answer):
        inner = next(group for group in match.groups() if group is not None)
        if _DOLLAR.search(inner) and "$" in (answer[0], answer[-1]):
            break
        answer = inner.strip()
    try:
        answer = braced(_TYPED.sub(_typed, _IDLE.sub("", _money(answer))))
    except TexError:
        return ""
    for pattern, spelling in _SPELLINGS:
        answer = pattern.sub(spelling, answer)
    answer = _PRODUCT.sub(lambda m: m[0].replace("(", r"\cdot ("), answer)
    answer = _PRIMED.sub(lambda m: f"{m[1]}_{{prime{len(m[2])}}}", answer)
    answer = _REPEATING.sub(_fraction, answer)
    answer = _THOUSANDS.sub(lambda m: m[0] if depth(answer[: m.start()]) else m[0].replace(",", ""), answer)
    answer = " ".join(answer.split())
    while answer.startswith("{") and answer.endswith("}") and not closes_early(answer[1:-1]):
        answer = answer[1:-1].strip()
    return answer.removesuffix(".").rstrip()


# -- what is not typed in TeX: signs of Unicode, amounts of money, names of functions, Chinese -------------------------


def _latex(answer: str) -> str:
    """The answer with TeX for signs, wide and mathematical letters, raised and lowered ones, and fractions.

    Not Unicode's NFKC, which reads a raised 2 as 2 and a choice's number in a circle as the number.
    """
    parts = []
    for kind, chars in itertools.groupby(unicodedata.normalize("NFC", answer.translate(_UNICODE)), _kind):
        run = list(chars)
        plain = [unicodedata.normalize("NFKC", char) for char in run]
        if kind == "letter":
            parts += plain
        elif kind in ("<super>", "<sub>"):
            parts.append(f"{'^' if kind == '<super>' else '_'}{{{''.join(plain)}}}")
        elif kind == "<fraction>":
            parts += [r"\frac{{{}}}{{{}}}".format(*text.split("\u2044")) for text in plain]
        elif kind == "set":
            parts += [rf"\mathbb{{{text}}}" for text in plain]
        elif kind == "<square>":
            units = [_UNIT_SIGN.match(text) for text in plain]
            parts += [_unit(unit) if unit else char for unit, char in zip(units, run, strict=True)]
        else:
            parts += run
    return "".join(parts).translate(_UNICODE)


_UNIT_SIGN = re.compile(r"^([A-Za-z]+)([23])?$")


def _unit(sign: re.Match[str]) -> str:
    return rf"\text{{{sign[1]}}}" + (f"^{{{sign[2]}}}" if sign[2] else "")


def _kind(char: str) -> str:
    """How Unicode derives the character from plain ones."""
    kind = unicodedata.decomposition(char).partition(" ")[0]
    if kind in ("<wide>", "<narrow>", "<noBreak>", "<font>"):
        return "set" if "DOUBLE-STRUCK CAPITAL" in unicodedata.name(char, "") else "letter"
    return kind


_CURRENCIES = {r"\$": "dollars", "£": "sterling", "€": "euro", "¥": "yuan", "₹": "rupees"}
_SIGN = rf"(?:US ?)?({'|'.join(map(re.escape, _CURRENCIES))})"
_AMOUNT = r"(\.?[0-9](?:(?:[0-9.,]|\{,\})*[0-9])?)"
_PRICE = re.compile(rf"{_SIGN}\s*{_AMOUNT}(?:\s*(thousand|million|billion|trillion))?|{_AMOUNT}\s*{_SIGN}")
_DOLLAR = re.compile(r"(?<!\\)\$")
_DOLLAR_OF_PRICE = re.compile(r"(?:^|(?<=[ ,;:=<>(+-]))((?:US ?)?)\$(?= ?\.?[0-9])|(?<=[0-9])()\$$")


def _money(answer: str) -> str:
    r"""The answer with a currency's name behind the amount in place of its sign; $ may stand without a backslash."""
    return _PRICE.sub(_amount, _DOLLAR_OF_PRICE.sub(r"\1\\$", answer)).replace(r"\$", "")


def _amount(price: re.Match[str]) -> str:
    before, first, scale, last, behind = price.groups()
    return rf"{(first or last).replace('{,}', ',')}\text{{ {scale or ''} {_CURRENCIES[before or behind]}}}"


_JOINT = r"[和与及且或]\s*(?=[0-9A-Za-z\\(\[{-])"
_TYPED = re.compile(
    rf"(?P<tex>\\(?:{'|'.join(TEXTS)})\s*\{{[^{{}}]*\}}|\\[A-Za-z]+)"
    r"|(?<![A-Za-z])(?P<name>pi(?![A-Za-z])"
    r"|(?:sqrt|(?:arc)?(?:sin|cos|tan)|log|ln)(?=\s*[\^_(\\0-9√]|\s+[a-z](?![A-Za-z])))"
    r"|(?P<root>[√∛∜])\s*(?P<number>[0-9]+(?:\.[0-9]+)?)?"
    rf"|(?<=[0-9A-Za-z)}}\]{HAN}])\s*(?P<joint>{_JOINT})"
    rf"|(?<=[0-9}}])\s*(?P<degrees>度)(?=$|[^{HAN}]|{_JOINT})"
    rf"|(?<=[0-9A-Za-z)}}])\s*(?P<unit>[{HAN}](?:(?!{_JOINT})[{HAN}/])*)"
)
_ROOTS = {"√": r"\sqrt", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]"}


def _typed(match: re.Match[str]) -> str:
    """The TeX of a function's name, a root, a Chinese conjunction or a Chinese unit outside of text."""
    if match["tex"]:
        return match["tex"]
    if match["name"]:
        return f"\\{match['name']} "
    if match["root"]:
        return _ROOTS[match["root"]] + (f"{{{match['number']}}}" if match["number"] else " ")
    if match["joint"]:
        return " or " if match["joint"][0] == "或" else " and "
    return r"^\circ " if match["degrees"] else rf"\text{{{match['unit']}}}"


def _fraction(match: re.Match[str]) -> str:
    """A repeating decimal as a fraction."""
    whole, start, period = match.groups()
    scale = 10 ** len(start)
    value = Fraction(int(f"{whole}{start}" or 0), scale) + Fraction(int(period), scale * (10 ** len(period) - 1))
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


# -- two numbers side by side -----------------------------------------------------------------------------------------

_OPERATORS = "cdot|times|div|pm|mp|le|ge|ne|cup|cap|in|frac|sqrt|binom|bmod|pmod|mod|" + "|".join(FUNCTIONS)
_MATRIX = re.compile(r"\\begin\{.*\\end\{[a-z]+\}", re.DOTALL)
_SCRIPTS_OF_FUNCTION = re.compile(rf"\\({'|'.join(FUNCTIONS)})(?:\s*[\^_]\s*\{{[^{{}}]*\}})+")
_ARGUMENTS = re.compile(
    r"\\(?:frac|binom)\s*\{[^{}]*\}\s*\{[^{}]*\}|\\sqrt\s*(?:\[[^\]]*\])?\s*\{[^{}]*\}|[\^_]\s*\{[^{}]*\}"
)
_SIDE_BY_SIDE = re.compile(
    rf"[0-9](?:\s|\\text\{{\s*\}}|\\(?!(?:{_OPERATORS})(?![A-Za-z]))[A-Za-z]+|\\\\)+[.]?[0-9]"
    r"|[0-9}]\s*\{+\s*[0-9]|[?})]\s*[0-9]|\\circ\s*[0-9]"
)


def has_adjacent_numbers(answer: str) -> bool:
    r"""Whether two numbers stand side by side, as in "4 5", "4\quad 5" or "4{5}": math-verify would add them up."""
    answer, before = _MATRIX.sub(";", answer), None
    while answer != before:  # arguments of commands, the inner ones first
        before, answer = answer, _ARGUMENTS.sub("?", _SCRIPTS_OF_FUNCTION.sub(r"\\\1 ", answer))
    return bool(_SIDE_BY_SIDE.search(answer.replace(r"\{", "(").replace(r"\}", ")")))


# -- size -------------------------------------------------------------------------------------------------------------

MAX_FACTORIAL = 10**4
_INTEGER_POWER = re.compile(r"(\([0-9]+\)|[0-9]+)\s*\^\s*(?:\{\s*([0-9]+)\s*\}|\(\s*([0-9]+)\s*\)|([0-9]+))")
_FACTORIAL = re.compile(r"([0-9]+)\s*\)?\s*!")
_BINOMIAL = re.compile(r"\\binom\s*\{[^{}]*?([0-9]+)[^{}]*\}\s*\{([^{}]*)\}")
_EXPONENT = re.compile(
    r"\^\s*(?:\{[^{}]*?(?<![0-9.])|\([^{}()]*?(?<![0-9.]))?[0-9]{7,}|(?:\^\s*\{[^{}]*){4}"  # a million, or four levels
)


def is_too_large(answer: str) -> bool:
    """Whether the answer has a power, factorial or binomial coefficient that takes too long: 10^{10^{10}}."""
    before = None
    while answer != before:  # powers of integers and factorials, the inner ones first
        before = answer
        for pattern, collapsed in ((_INTEGER_POWER, _collapsed), (_FACTORIAL, _collapsed_factorial)):
            if any(int(match[1][:20]) > MAX_FACTORIAL for match in _FACTORIAL.finditer(answer)):
                return True
            if any(len(match[1]) > 5 and len(match[2].strip()) > 3 for match in _BINOMIAL.finditer(answer)):
                return True
            if _EXPONENT.search(answer):
                return True
            answer = pattern.sub(collapsed, answer)
    return False


def _collapsed(power: re.Match[str]) -> str:
    """The value of a power of integers, or a number of 20 digits where it is larger."""
    base, exponent = int(power[1].strip("()")[:20]), int((power[2] or power[3] or power[4])[:8])
    return str(base**exponent) if exponent <= 60 and base**exponent < 10**20 else "9" * 20


def _collapsed_factorial(match: re.Match[str]) -> str:
    return match[0].replace("!", "") if int(match[1][:20]) <= 3 else "9" * 20


# -- brackets and lists -----------------------------------------------------------------------------------------------

_BRACKETS = ((r"\{", r"\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")"))
COMMA = re.compile(",")
UNION = re.compile(r"\\cup(?![A-Za-z])")
_CONJUNCTION = r"\b(?:and|or)\b|\\(?:lor|vee)(?![A-Za-z])"
OR = re.compile(r"\bor\b|\\(?:lor|vee)(?![A-Za-z])")
ALTERNATIVE = re.compile(rf"{OR.pattern}|\\cup(?![A-Za-z])")
_ITEM = re.compile(rf",|;|{_CONJUNCTION}")
_PLUS_MINUS = re.compile(r"\\(pm|mp)(?![A-Za-z])\s*")
MAX_SIGNS = 3  # of \pm and \mp in one item


def depth(answer: str) -> int:
    """Number of brackets that are open at the end of the text."""
    return sum((char in "([{") - (char in ")]}") for char in answer)


def deepest(answer: str) -> int:
    """Largest number of nested brackets."""
    level = most = 0
    for char in answer:
        level += (char in "([{") - (char in ")]}")
        most = max(most, level)
    return most


def closes_early(inner: str) -> bool:
    """Whether the text closes a bracket that it does not open."""
    level = 0
    for char in inner:
        level += (char in "([{") - (char in ")]}")
        if level < 0:
            return True
    return False


def split(answer: str, separator: re.Pattern[str]) -> list[str]:
    """The parts between matches of `separator` outside of brackets, stripped."""
    parts, start, at = [], 0, 0
    while at < len(answer):
        match = separator.match(answer, at)
        if match and depth(answer[start:at]) == 0:
            parts.append(answer[start:at].strip())
            start = at = match.end()
        else:  # an escaped character is one
            at += 2 if answer[at] == "\\" and at + 1 < len(answer) and not answer[at + 1].isalpha() else 1
    return [*parts, answer[start:].strip()]


def items(answer: str) -> list[str]:
    r"""The items of a list: split at commas, semicolons, "and", "or"; 1 \pm 2 has two items."""
    parts = split(answer, _ITEM)
    pieces = [part for part in parts if part] if len(parts) > 1 else [answer]
    return [item for part in pieces for item in _signed(part)]


def _signed(part: str) -> list[str]:
    r"""The values of an item with \pm or \mp; the item itself where the signs have no single reading.

    Signs of two \pm are independent: \pm 2\pm 3 are four values. One \pm and every \mp belong together.
    """
    signs = _PLUS_MINUS.findall(part)
    is_set = part.startswith(r"\{")  # its elements have signs
    if not signs or is_set or len(signs) > MAX_SIGNS or (signs.count("pm") > 1 and "mp" in signs):
        return [part]
    values = []
    for chosen in itertools.product("+-", repeat=max(1, signs.count("pm"))):
        upper, lower = iter(chosen), "-+"[chosen[0] == "-"]
        values.append(_PLUS_MINUS.sub(lambda m, upper=upper, lower=lower: next(upper) if m[1] == "pm" else lower, part))
    return values


def bracketed(answer: str) -> tuple[str, list[str]] | None:
    r"""(opening and closing bracket, items) of (a, b), [a, b), \{a, b\}; None for anything else."""
    for opening, closing in _BRACKETS:
        if answer.startswith(opening) and answer.endswith(closing):
            inner = answer[len(opening) : -len(closing)].strip()
            parts = split(inner, COMMA)
            if opening == r"\{":
                parts = [value for part in parts for value in _signed(part)]
            one = len(parts) == 1 and opening != r"\{"
            return None if one or closes_early(inner) else (opening + closing, parts)
    return None
