r"""TeX arguments in braces: \frac12, \sqrt\pi and x^2 become \frac{1}{2}, \sqrt{\pi} and x^{2}.

Follows TeX's rule: an argument is one group, one command or one character. Deviates where TeX's own reading is no
formula and only one other is possible: a command that is an argument keeps its own arguments (\sqrt\frac12), \sqrt and
a script take a bracket in parentheses (\sqrt(2), 2^(10)), a script a number or a sign with what follows (2^10, 10^-7).
The script of a function's name is one character in any case: \log_28 is \log_2 8, and \sin^22x is \sin^2 2x.
"""

from __future__ import annotations

import re

MAX_NESTING = 50  # of groups and of commands that are arguments

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|\.[0-9]+|\s+|.", re.DOTALL)
_FRACTIONS = dict.fromkeys((rf"\{style}frac" for style in ("", "d", "t", "c")), r"\frac")
_FRACTIONS |= dict.fromkeys((r"\nicefrac", r"\sfrac"), r"\frac")
_FRACTIONS |= dict.fromkeys((r"\binom", r"\dbinom", r"\tbinom"), r"\binom")
_INFIX = {r"\over": r"\frac", r"\choose": r"\binom"}  # {1\over 2}
TEXTS = "text mathrm textrm textbf textit mathbf mbox operatorname mathit textsf textnormal".split()
_TEXTS = {rf"\{name}" for name in TEXTS}
_ONE = {
    rf"\{name}"
    for name in "sqrt overline bar underline dot vec hat widehat widetilde tilde overrightarrow mathbb mathcal "
    "boldsymbol bm not cancel".split()
} | _TEXTS
FUNCTIONS = (
    "arcsinh|arccosh|arctanh|arcsin|arccos|arctan|arccot|arcsec|arccsc|sinh|cosh|tanh|coth|sin|cos|tan|cot|sec|csc"
    "|log|ln|lg|exp"
).split("|")
_FUNCTIONS = {rf"\{name}" for name in FUNCTIONS}
_OPENING = {")": "(", "]": "["}


class TexError(ValueError):
    """The text is no TeX: its braces do not pair, or one base has two exponents."""


def braced(text: str) -> str:
    r"""`text` with every argument in braces, and \frac and \binom as the only names of fractions and binomials.

    A product without a sign beside a fraction or binomial gets \cdot, because math-verify adds such factors where both
    are rational, as if they were a mixed number. Only digits before \frac are one. Raises TexError for text that is no
    TeX or nests deeper than MAX_NESTING.
    """
    return _Reader(text).group("")


class _Reader:
    """`tokens` from `at` on are still to be read."""

    def __init__(self, text: str) -> None:
        self.tokens = _TOKEN.findall(text)
        self.at = self.nesting = 0

    def enter(self) -> None:
        """Count one more level of groups and arguments."""
        self.nesting += 1
        if self.nesting > MAX_NESTING:
            raise TexError(f"more than {MAX_NESTING} levels of groups and arguments")

    def peek(self) -> str:
        """The next token that is not a space; empty at the end."""
        while self.at < len(self.tokens) and self.tokens[self.at].isspace():
            self.at += 1
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def group(self, closing: str, denominator: bool = False) -> str:
        r"""The text up to the token `closing`, which is read too; `denominator`: it stands behind an \over."""
        self.enter()
        parts: list[str] = []
        scripts: set[str] = set()  # of the base that stands last
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token == closing:
                break
            if token in ("}", "\\") or (denominator and token in _INFIX):
                raise TexError(f"{token} without what belongs to it")
            if closing and token == _OPENING.get(closing):
                parts.append(f"{token}{self.group(closing)}{closing}")
                continue
            if token in _INFIX:
                rest = self.group(closing, denominator=True)
                self.nesting -= 1
                return f"{_INFIX[token]}{{{''.join(parts).strip()}}}{{{rest.strip()}}}"
            if token in ("^", "_"):
                if token in scripts:
                    raise TexError(f"a base with two {token}")
                scripts.add(token)
                base = next((part for part in reversed(parts) if not part.isspace() and part[0] not in "^_"), "")
                parts.append(self.script(token, base))
                continue
            if not token.isspace():
                scripts.clear()
            if token in _FRACTIONS and parts and self._multiplies(_FRACTIONS[token], parts):
                parts.append(r"\cdot ")
            parts.append(self.item(token))
        else:
            if closing:
                raise TexError(f"{closing} is missing")
        self.nesting -= 1
        return "".join(parts)

    def _multiplies(self, name: str, parts: list[str]) -> bool:
        r"""Whether a fraction or binomial behind `parts` is a factor that needs a sign: \frac12\frac12, 2\binom52."""
        last = next((part for part in reversed(parts) if not part.isspace()), "")
        return (
            last.endswith(")")
            or last.startswith((r"\frac{", r"\binom{"))
            or (name == r"\binom" and last[-1:].isdigit())
        )

    def item(self, token: str) -> str:
        """`token`, which has been read, with its arguments."""
        if token == "{":
            return f"{{{self.group('}')}}}"
        if name := _FRACTIONS.get(token):
            text = name + self.argument() + self.argument()
            return text + (r"\cdot " if self.peek() == "(" else "")
        if token not in _ONE:
            return token
        if token in _TEXTS and self.peek() == "{":
            return token + self._verbatim()
        degree = ""
        if token == r"\sqrt" and self.peek() == "[":
            self.at += 1
            degree = f"[{self.group(']')}]"
        return token + degree + self.argument(parentheses=token == r"\sqrt")

    def argument(self, parentheses: bool = False, numbers: bool = False) -> str:
        """The next argument in braces; empty where there is none."""
        token = self.peek()
        if token in ("", "}", "&", r"\\"):
            return ""
        if token in ("^", "_", "\\"):
            raise TexError(f"{token} as an argument")
        self.at += 1
        if token == "{":
            return f"{{{self.group('}')}}}"
        if token == "(" and parentheses:
            return f"{{{self.group(')')}}}"
        if len(token) > 1 and token[0] in "0123456789." and not numbers:  # one digit; the others are what follows
            self.at -= 1
            self.tokens[self.at] = token[1:]
            return f"{{{token[0]}}}"
        self.enter()
        text = self.item(token)
        self.nesting -= 1
        return f"{{{text}}}"

    def script(self, sign: str, base: str) -> str:
        """`sign` (^ or _) with its argument."""
        if base in _FUNCTIONS:
            return sign + self.argument(parentheses=True)
        if self.peek() == "-" and (following := self.tokens[self.at + 1 : self.at + 2]):  # 10^-7
            if re.match(r"[0-9A-Za-z.(\\]", following[0]):
                self.at += 1
                inner = self.argument(parentheses=True, numbers=True)[1:-1]
                return f"{sign}{{-({inner})}}" if following[0] == "(" else f"{sign}{{-{inner}}}"
        return sign + self.argument(parentheses=True, numbers=True)

    def _verbatim(self) -> str:
        """A group as it stands: text."""
        start, level = self.at, 0
        while self.at < len(self.tokens):
            level += {"{": 1, "}": -1}.get(self.tokens[self.at], 0)
            self.at += 1
            if not level:
                return "".join(self.tokens[start : self.at])
        raise TexError("} is missing")
