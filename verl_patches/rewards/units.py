"""Units and scale words behind a value: "5 km", "30 minutes", "12 cm^2", "5 million dollars", "90 degrees"."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

HAN = "\u4e00-\u9fff"  # Chinese characters
_SCALES = {"dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {"百": 10**2, "千": 10**3, "万": 10**4, "百万": 10**6, "千万": 10**7, "亿": 10**8}
_CHINESE = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (("^([百千]?万|亿)", r"\1 "), ("平方", " square "), ("立方", " cubic "), ("每", "/"))
]
_TABLE = """
length m meter metre 米 = 1; cm centimeter centimetre 厘米 公分 = 1/100; mm millimeter millimetre 毫米 = 1/1000
length dm decimeter decimetre 分米 = 1/10; km kilometer kilometre 千米 公里 = 1000
length in inch 英寸 = 0.0254; ft foot feet 英尺 = 0.3048; yd yard 码 = 0.9144; mi mile 英里 = 1609.344
time s sec second 秒 = 1; min minute 分钟 = 60; h hr hour 小时 = 3600; day 天 日 = 86400; week 周 星期 = 604800
calendar month 月 个月 = 1; year 年 = 12
mass g gram 克 = 1; kg kilogram 千克 公斤 = 1000; mg milligram 毫克 = 1/1000; 吨 = 1000000
mass lb pound 磅 = 453.59237; oz ounce 盎司 = 28.349523125
money dollar USD 美元 = 100; cent ¢ 美分 = 1
yuan yuan 元 人民币 RMB CNY = 1; 角 = 1/10
euro euro 欧元 EUR = 1
sterling sterling 英镑 GBP = 1
yen yen 日元 円 JPY = 1
rupee rupee INR = 1
volume l L liter litre 升 = 1; ml mL milliliter millilitre 毫升 = 1/1000
angle degree deg ^\\circ 度 = 1
temperature celsius 摄氏度 = 1
fahrenheit fahrenheit 华氏度 = 1
count unit 个 只 本 张 条 棵 辆 件 支 枝 种 块 = 1
people person people 人 名 位 = 1
score 分 = 1
age 岁 = 1
"""
_UNITS = {
    name: (line.split()[0], Fraction(group.partition("=")[2].strip()))
    for line in _TABLE.strip().splitlines()
    for group in line.partition(" ")[2].split(";")
    for name in group.partition("=")[0].split()
}
_NOUN = re.compile("[a-z]{2,}[^isu]s|children|women")  # a plural
_NUMBER_WORD = re.compile(  # a plural, or what looks like one, that changes the value
    "(?:ten|nth|one|two|three|four|five|six|seven|eight|nine|eleven|twelve|hundred|thousand|[a-z]*illion|[a-z]+teen|dozen"
    "|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|[a-z]+fth|[a-z]+eenth|[a-z]+tieth|[a-z]*hundredth"
    "|[a-z]*thousandth|[a-z]*illionth|half|halve|quarter|pair|couple|score|double|triple|percent|point|remainder"
    "|exponent|power|root|radian|gradian|negative|positive|time|sometime|inverse|reciprocal|square|cube|factorial"
    "|perhap|alway|cosine|sine|tangent|log|base|equal|mean|digit|decimal|look|seem|doe|other|more|twentie|[a-z]+tie)s"
)
_SHORT = {"mph": "mi/hr", "kph": "km/hr", "kmh": "km/hr"}
_QUANTITY = re.compile(
    r"(?P<value>.*(?:[0-9})]|\\pi))\s*(?:"
    rf"\\text\{{\s*(?P<text>[A-Za-z¢{HAN}][A-Za-z¢{HAN}/ .^{{}}0-9]*?)\s*\}}(?P<power>\^\{{?[23]\}}?)?"
    r"|(?P<degrees>\^\\circ)"
    r"|(?P<bare>(?<!\\pi)(?!(?:in|ft|mi|yd|lb|oz|hr)\b)[A-Za-z]{2}[A-Za-z/ .]*(?:\^\{?[23]\}?)?"
    r"|(?<= )[A-Za-z][A-Za-z/ .]*(?:\^\{?[23]\}?)?))"
)
_SUM_OR_VARIABLE = re.compile(r".\s*[+-]|(?<![\\A-Za-z])[A-Za-z]")


class Unit(NamedTuple):
    r"""`factor` to the dimension's base units; `dimension`: {(name, power)}; an unknown noun has its own dimension.

    `letters`: every name is one letter outside of \text{}, which may also be a variable.
    """

    factor: Fraction
    dimension: frozenset[tuple[str, int]]
    letters: bool = False


def quantity(answer: str) -> tuple[str, Unit | None]:
    """(value, unit) of a normalised answer; None without a unit. Scale words are multiplied into the value.

    Only units of the table and plural nouns are units. Any other text stays in the value, which then has no meaning.
    """
    match = _QUANTITY.fullmatch(answer)
    if not match:
        return answer, None
    value, bare = match["value"].strip(), match["bare"]
    if match["degrees"] and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", value):
        return answer, None
    text = (match["text"] or bare or match["degrees"]).strip(" .")
    for pattern, spelling in _CHINESE:
        text = pattern.sub(spelling, text)
    words = (_SHORT.get(text, text) + (match["power"] or "")).split()
    scale = 1
    while words and words[0].lower() in _SCALES:
        scale *= _SCALES[words.pop(0).lower()]
    if (bare or scale > 1) and _SUM_OR_VARIABLE.search(value):
        return answer, None
    unit = _unit(" ".join(words)) if words else None
    if words and not unit:
        return answer, None
    if unit and bare and not re.search("[A-Za-z]{2}", bare):
        unit = unit._replace(letters=True)
    return (rf"({value})\cdot {scale}" if scale > 1 else value), unit


def _unit(text: str) -> Unit | None:
    factor, powers = Fraction(1), {}
    parts = re.split(r"/|\bper\b", text)
    for number, part in enumerate(parts):
        power, names = 1, 0
        for word in part.split():
            if word.strip(".").lower() in ("square", "sq", "cubic") and not names:
                power = 3 if word.lower() == "cubic" else 2
                continue
            match = re.fullmatch(rf"(\^\\circ|[A-Za-z¢{HAN}]+\.?)(?:\^\{{?([23])\}}?)?", word)
            known = match and _known(match[1].rstrip("."))
            if not known:
                return None
            dimension, size = known
            signed = (int(match[2]) if match[2] else power) * (-1 if number else 1)
            factor, powers[dimension] = factor * size**signed, powers.get(dimension, 0) + signed
            names += 1
        if names != 1 or number > 1:
            return None
    return Unit(factor, frozenset(item for item in powers.items() if item[1]))


def _known(name: str) -> tuple[str, Fraction] | None:
    """(dimension, factor) of a unit of the table or of a plural noun; None for any other word."""
    low = name.lower() if len(name) > 3 else name  # K, M and Mm are not k, m and mm
    for spelling in (low, low.removesuffix("s"), low.removesuffix("es")):
        if spelling in _UNITS and (spelling == low or len(spelling) > 1):
            return _UNITS[spelling]
    if _NOUN.fullmatch(name) and not _NUMBER_WORD.fullmatch(name):
        return name.removesuffix("s"), Fraction(1)
    return None
