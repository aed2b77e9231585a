"""Units and scale words behind a value: "5 km", "30 minutes", "12 cm^2", "5 million dollars", "90 degrees"."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_TABLE = """
length m meter metre = 1; cm centimeter centimetre = 1/100; mm millimeter millimetre = 1/1000
length km kilometer kilometre = 1000; in inch inche = 0.0254; ft foot feet = 0.3048; yd yard = 0.9144
length mi mile = 1609.344
time s sec second = 1; min minute = 60; h hr hour = 3600; day = 86400; week = 604800
mass g gram = 1; kg kilogram = 1000; mg milligram = 1/1000; lb pound = 453.59237; oz ounce = 28.349523125
money dollar usd = 100; cent ¢ = 1
volume l liter litre = 1; ml milliliter millilitre = 1/1000
angle degree deg ^\\circ = 1
"""
_UNITS = {
    name: (line.split()[0], Fraction(group.partition("=")[2].strip()))
    for line in _TABLE.strip().splitlines()
    for group in line.partition(" ")[2].split(";")
    for name in group.partition("=")[0].split()
}
_FUNCTIONS = set("sin cos tan cot sec csc log ln lg exp sqrt gcd lcm mod pi".split())
_QUANTITY = re.compile(
    r"(?P<value>.*[0-9})])\s*(?:"
    r"\\text\{\s*(?P<text>[A-Za-z¢][A-Za-z¢/ .^{}0-9]*?)\s*\}(?P<power>\^\{?[23]\}?)?"
    r"|(?P<degrees>\^\\circ)"
    r"|(?P<bare>(?:[A-Za-z]{2,}| [A-Za-z])(?:[A-Za-z/ .]*)(?:\^\{?[23]\}?)?))"
)


class Unit(NamedTuple):
    """`factor` to the dimension's base units; `dimension`: {(name, power)}; an unknown word has its own dimension."""

    factor: Fraction
    dimension: frozenset[tuple[str, int]]


def quantity(answer: str) -> tuple[str, Unit | None]:
    """(value, unit) of a normalised answer; None without a unit. Scale words are multiplied into the value."""
    match = _QUANTITY.fullmatch(answer)
    if not match:
        return answer, None
    value, bare = match["value"].strip(), match["bare"]
    if match["degrees"] and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value):
        return answer, None
    words = ((match["text"] or bare or match["degrees"]).strip(" .") + (match["power"] or "")).split()
    if bare and (words[0] in _FUNCTIONS or re.search(r"\\[A-Za-z]*$", value)):
        return answer, None
    while words and words[0].lower() in _SCALES:
        value = rf"({value})\cdot {_SCALES[words.pop(0).lower()]}"
    return value, _unit(" ".join(words)) if words else None


def _unit(text: str) -> Unit:
    factor, powers = Fraction(1), {}
    for number, part in enumerate(re.split(r"/|\bper\b", text)):
        power = 1
        for word in part.split():
            if word.lower() in ("square", "sq", "cubic"):
                power = 3 if word.lower() == "cubic" else 2
                continue
            name, _, exponent = (word, "", "") if word == r"^\circ" else word.partition("^")
            power = int(exponent.strip("{}")) if exponent.strip("{}").isdigit() else power
            dimension, size = _known(name.replace(".", ""))
            signed = -power if number else power
            factor, powers[dimension] = factor * size**signed, powers.get(dimension, 0) + signed
            power = 1
    return Unit(factor, frozenset(item for item in powers.items() if item[1]))


def _known(name: str) -> tuple[str, Fraction]:
    low = name.lower()
    spellings = (name, low, low.removesuffix("s"), low.removesuffix("es"))
    return next(
        (_UNITS[spelling] for spelling in spellings if spelling in _UNITS), (low.removesuffix("s"), Fraction(1))
    )
