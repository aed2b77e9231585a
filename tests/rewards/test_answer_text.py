r"""What is typed without TeX (wide digits, money, Chinese units), negations and \pm: pairs, random values."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.rewards.answer_text import MAX_SIGNS, items, normalise
from verl_patches.rewards.equivalence import equivalent

EQUAL = r"""
5 == ５ ; 42 == ４２ ; 0.5 == ０．５ ; (1,2) == （１，２） ; \{1,2\} == ｛１，２｝ ; -5 == －５ ; 5+x == ５＋ｘ
65\% == ６５％ ; 1/2 == １／２ ; 5 == 𝟓 ; x == 𝑥 ; x=5 == ｘ＝５ ; 5 == 5。 ; 1,2 == 1、2 ; \$5 == ＄５
1/2 == ½ ; 1/2 == 1⁄2 ; 3/4 == ¾ ; 1/8 == ⅛ ; 2/3 == ⅔ ; 7/2 == 3½ ; 3.5 == 3 ½ ; -7/2 == -3½
\frac{x}{2} == ½x ; \frac{3}{2} == 1½ ; 50\% == ½ ; 25 == 5² ; x^2 == x² ; x^{12} == x¹² ; 10^{-7} == 10⁻⁷
x_1=5 == x₁=5 ; x_{12} == x₁₂ ; 1010_2 == 1010₂ ; x^{n+1} == xⁿ⁺¹ ; 5 cm^2 == 5 cm² ; 5 m^2 == 5㎡ ; 5 cm == 5㎝
30^\circ == 30º ; 30^\circ == 30° ; \frac13 == 0.333… ; \sqrt{12} == √12 ; 2 == ∛8 ; 2 == ∜16
\sqrt{12} == √(12) ; \sqrt{\pi} == √π ; \frac{\sqrt{3}}{2} == √3/2 ; 2\pi == 2pi ; \frac{\pi}{2} == pi/2
\sin x == sin(x) ; \frac12 == sin(30°) ; \ln 2 == ln 2 ; \sin^2 x == sin^2 x ; \sqrt{2} == sqrt 2
x\in\mathbb{R} == x∈ℝ ; x\ne 5 == x≠5 ; 5 == 5厘米 ; 5 == 5 厘米 ; 5 == 5\text{厘米} ; 5厘米 == 5 cm
5米 == 500厘米 ; 5 km == 5公里 ; 5 km == 5千米 ; 2.5平方米 == 25000平方厘米 ; 5 m^2 == 5平方米
5 cm^3 == 5立方厘米 ; 5\text{ kg} == 5公斤 ; 5千克 == 5000克 ; 36千米/小时 == 10米每秒 ; 30分钟 == 0.5小时
25\pi == 25π平方厘米 ; x=5 == 5厘米 ; x=5厘米 == 5 ; 5,6 == 5厘米,6厘米 ; 12 == 12个 ; 12 people == 12人
8 == 8岁 ; 3 == 3天 ; 7 == 7\mathrm{米} ; 5000 == 5千 ; 5 == 5元 ; 30° == 30\text{度}
1234.56 == $1,234.56 ; x\ge2 == x≧2 ; 5 == ¥5 ; 5元 == ￥5 ; 5元 == 50角
5 yuan == 5元 ; 5美元 == \$5 ; 500美分 == \$5 ; 50000 == 5万 ; 50000 == 5万元 ; 5亿 == 500000000 ; 30 == 30度
30^\circ == 30度 ; \frac12 == \sin 30度 ; 25 == 25℃ ; 25℃ == 25摄氏度 ; 25^\circ C == 25 ℃
25^\circ\text{F} == 25℉ ; x=5,x=6 == x=5或x=6 ; 5,6 == 5和6 ; 30,60 == 30度或60度 ; 5,6 == 5元、6元 ; 5 == $5.00
5 == $5 ; \$5 == $5.00 ; 5 == \$5.00 ; 5000000 == $5 million ; 500 cents == $5 ; 1000 == $1,000 ; 5 == 5$
5 == US$5 ; -5 == -$5 ; 0.5 == $.50 ; 5 == $5$ ; 5.00 == $$5.00$$ ; 5,6 == $5, $6 ; 5 == $\$5.00$ ; x=5 == $5.00
5 == x=$5 ; 5 == £5 ; 5 == €5.00 ; £5 == 5英镑 ; 5欧元 == €5 ; \$5 == 5$ ; x\ne 5 == x\not=5 ; x\ne 5 == x\neq5
x\ne 5 == x\not =5 ; x\ne 5 == x\not{=}5 ; \ne 5 == \not=5 ; \ne 5 == ≠5 ; x\ne 5 == x!=5 ; \pm5 == 5,-5
\pm5 == -5,5 ; \pm5 == \mp5 ; \pm5 == ±5 ; \pm5 == +/-5 ; x=\pm5 == 5,-5 ; \{5,-5\} == \{\pm5\}
\{3,-1,7\} == \{1\pm2,7\} ; \pm2\pm3 == 5,-5,1,-1 ; \pm2\pm3 == \pm5,\pm1 ; \pm2\pm3 == \pm3\pm2
\pm2\mp3 == \pm1 ; \pm\sqrt2\pm1 == \pm(\sqrt2+1),\pm(\sqrt2-1)
\frac{1\pm\sqrt5}2 == \frac{1+\sqrt5}2,\frac{1-\sqrt5}2 ; (1,-2),(-1,2) == (\pm1,\mp2) ; 1\pm\sqrt{2} == 1±√2
5 == \lambda=5 ; 5 == \text{Area}=5 ; 5 == \sigma_x=5 ; 5 == \max=5"""
UNEQUAL = r"""
5 == ６ ; 42 == ４３ ; 42 == ４ ２ ; 1 == ① ; 124 == ①②④ ; 4 == Ⅳ ; 42 == ٤٢ ; 1,2 == （１，２） ; 52 == 5²
25 == 5₂ ; 1/2 == 1½ ; 3/2 == 3½ ; 2 == ½ ; 12 == ½ ; 31/2 == 3½ ; 3/2 == 3 ½ ; 1/4 == ⅛ ; x2 == x² ; 2x == x²
x^2 == x₂ ; 107 == 10⁻⁷ ; x^{12} == x¹x² ; 5 m == 5㎡ ; 5 m2 == 5 m ; 5 cm^3 == 5㎝ ; R == ℝ ; 12 == √1 2
2 == √8 ; i n s x == sin(x) ; ip == pi ; 5 == 5\u200b1 ; x=5 == x≠5 ; 5 == ≠5 ; 5厘米 == 5米 ; 5米 == 50厘米
5平方厘米 == 5厘米 ; 5 m^2 == 5立方米 ; 5 == 5厘米6 ; 11 == 5米6厘米 ; 5元 == 5美元 ; 5元 == 5角 ; 5元 == 5厘米
5 == 6元 ; 5 == 5万 ; 5 == 5亿 ; 5 == 5千 ; 5 == 5倍 ; 5 == 5次方 ; 5 == 5折 ; 5 == 5成 ; 5 == 5个半
5 == 5分之一 ; 5 == 5分之2 ; 5 == 5不对 ; 5 == 不是5 ; 5 == 5以上 ; 5千克 == 5克 ; 30度 == 30分钟 ; 30° == 60度
30 == 31度 ; 30 == 30度角以外 ; 25℃ == 25℉ ; 25℃ == 25° ; 25 == 25°x ; 10米每秒 == 10米 ; 5% == 5元 ; 5 == 5或6
5 == 5和6 ; 5,6 == 5和7 ; 5 == 负5 ; 1/5 == 5每 ; 36千米/小时 == 36米每秒 ; 2小时 == 2分钟 ; 12人 == 12个
3天 == 3周 ; 1年 == 1月 ; 5 == $5.01 ; 5 == $500 ; 5 == $5, $6 ; 5 == $5$6 ; 11 == $5 $6 ; 56 == $5$6$
5 == $4$5 ; 5 == 5$6 ; \$5 == 5 cents ; 5 cents == $5 ; 5 == -$5 ; \$5 == £5 ; £5 == €5 ; ¥5 == $5
5 == $5 million ; 5 == $5k ; 5\% == $5 ; 5 == $x$5 ; 5 == $5x ; 42 == $41$ and $42$ ; 5 == $ ; 5 == \$
5 == \not=5 ; 5 == \not =5 ; 5 == \not{=}5 ; 5 == x\not=5 ; x=5 == x\not=5 ; x=5 == x\ne5 ; 5 == \neq5
5 == \cancel{=}5 ; 5 == \centernot=5 ; 5 == \ne=5 ; 5 == \neg=5 ; 5 == \not\approx5 ; 5 == \not5 ; 5 == \lnot 5
5 == \text{not}=5 ; 5 == \text{is not }=5 ; 5 == \pi=5 ; 5 == \infty=5 ; 5 == \emptyset=5 ; 5 == \sim=5
5 == \nless=5 ; x>5 == x\not>5 ; x<5 == 5\not>x ; x\ge5 == x\not<5 ; x\ne5 == x\ne6
x\in\{1,2\} == x\notin\{1,2\} ; \{1,2\} == x\not\in\{1,2\} ; x\in\{1,2\} == x∉\{1,2\} ; 5 == 3\not=5
5 == y=\not=5 ; \pm5 == \pm2\pm3 ; \pm1 == \pm2\pm3 ; \pm5 == \pm2\mp3 ; 5 == \pm2\pm3 ; 5 == \pm5 ; \pm5 == 5
\pm5 == 5,5 ; \pm5 == \pm6 ; 5,-5,1 == \pm2\pm3 ; 0 == \pm1\pm1 ; \pm6 == \pm1\pm2\pm3
\pm10 == \pm1\pm2\pm3\pm4 ; \pm5 == \pm\pm5 ; \pm1 == \pm2\pm3\mp1 ; (1,2),(-1,-2) == (\pm1,\pm2)
\{1,2\} == \{\pm1,2\} ; \{\pm5\} == \{\pm2\pm3\} ; x=\pm5 == x=\pm2\pm3 ; \pm5 == 2\pm3 ; 1\pm2 == 3 ; 5 == 5\pm"""


def pairs(table):
    return [tuple(pair.split(" == ")) for pair in table.strip().replace("\n", " ; ").split(" ; ")]


@pytest.mark.parametrize(("gold", "answer"), pairs(EQUAL))
def test_equal(gold, answer):
    assert equivalent(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), pairs(UNEQUAL))
def test_not_equal(gold, answer):
    assert not equivalent(gold, answer)


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


WIDE = str.maketrans("0123456789.-/", "０１２３４５６７８９．－／")
RAISED = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
VULGAR = {Fraction(1, 2): "½", Fraction(1, 3): "⅓", Fraction(2, 3): "⅔", Fraction(3, 4): "¾", Fraction(5, 8): "⅝"}


def spellings(value: int, part: Fraction) -> list[tuple[str, Fraction]]:
    """(text, value) of an integer and a proper fraction, as they may be typed."""
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
@given(st.integers(-999, 999), st.sampled_from(sorted(VULGAR)), st.integers(-999, 999))
def test_a_typed_number_equals_its_own_value_and_no_other(value, part, other):
    for text, number in spellings(value, part):
        assert equivalent(str(number), text), (number, text)
        for wrong in {Fraction(other), number + 1, -number, 10 * number + 1, number / 3} - {number}:
            assert not equivalent(str(wrong), text), (wrong, text)


@settings(max_examples=200, deadline=None)
@given(st.text("$\\£¥元厘米度个万½²₃５（）｛｝①√π≠± 0123.,^_{}-=/", max_size=16))
def test_no_typed_text_equals_a_number_that_it_does_not_show(text):
    """Errors that `equivalent` raises count as unequal in the helper process; they must be those of its libraries."""
    try:
        found = equivalent("7919", text)
    except (TypeError, ValueError, AttributeError, NotImplementedError, RecursionError):
        found = False
    assert not found
