r"""TeX's arguments without braces: the reader, and random expressions in both spellings; pairs: equal_pairs.txt."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_patches.rewards.equivalence import equivalent
from verl_patches.rewards.tex import TexError, braced

# text -> with braces
READ = r"""
\frac12 -> \frac{1}{2} ; \frac{1}2 -> \frac{1}{2} ; \frac1{72} -> \frac{1}{72} ; \frac 1 2 -> \frac{1}{2}
\frac123 -> \frac{1}{2}3 ; \dfrac\pi4 -> \frac{\pi}{4} ; \tfrac ab -> \frac{a}{b} ; \frac1x -> \frac{1}{x}
\frac\sqrt32 -> \frac{\sqrt{3}}{2} ; \frac\alpha\beta -> \frac{\alpha}{\beta}
\cfrac{1}{\frac23} -> \frac{1}{\frac{2}{3}} ; \sqrt\pi -> \sqrt{\pi} ; \sqrt12 -> \sqrt{1}2
\sqrt xy -> \sqrt{x}y ; \sqrt[3]2 -> \sqrt[3]{2} ; \sqrt(2) -> \sqrt{2} ; \sqrt((1+2)3) -> \sqrt{(1+2)3}
\sqrt\frac12 -> \sqrt{\frac{1}{2}} ; \sqrt[\frac12]4 -> \sqrt[\frac{1}{2}]{4} ; \binom52 -> \binom{5}{2}
\dbinom n{k+1} -> \binom{n}{k+1} ; {5\choose2} -> {\binom{5}{2}} ; {a+b\over2} -> {\frac{a+b}{2}}
x^2y -> x^{2}y ; x^\pi -> x^{\pi} ; 2^\frac12 -> 2^{\frac{1}{2}} ; x_1^2 -> x_{1}^{2} ; x^2_1 -> x^{2}_{1}
e^-x -> e^{-x} ; 2^10 -> 2^{10} ; 4^.5 -> 4^{.5} ; 10^-7 -> 10^{-7} ; 2^(3+1) -> 2^{3+1}
2^-(3+1) -> 2^{-(3+1)} ; e^i\pi -> e^{i}\pi ; \log_28 -> \log_{2}8 ; \sin^22x -> \sin^{2}2x
\tan^{-1}1 -> \tan^{-1}1 ; 30^\circ -> 30^{\circ} ; \overline3 -> \overline{3} ; \text5 -> \text{5}
5\text{ a_1 \frac12} -> 5\text{ a_1 \frac12} ; \mathbb R -> \mathbb{R} ; \not=5 -> \not{=}5 ; \not 5 -> \not{5}
2\binom52 -> 2\cdot \binom{5}{2} ; \frac42(3) -> \frac{4}{2}\cdot (3)
\frac42\frac62 -> \frac{4}{2}\cdot \frac{6}{2} ; (2)\frac12 -> (2)\cdot \frac{1}{2} ; 2\frac12 -> 2\frac{1}{2}
\sin\frac12 -> \sin\frac{1}{2} ; \{1,2\} -> \{1,2\}
\begin{pmatrix}1\\\frac12\end{pmatrix} -> \begin{pmatrix}1\\\frac{1}{2}\end{pmatrix} ; \frac1 -> \frac{1}
x^ -> x^"""
NO_TEX = r"""
x^2^3 ; x^{2^{3}}^2 ; x^2 ^3 ; x_1_2 ; x^2_1^3 ; { ; } ; \frac{1}{2 ; \frac{1}{2}} ; \sqrt(2 ; \text{ ; x^_2 ; x^^2"""


@pytest.mark.parametrize("pair", READ.strip().replace("\n", " ; ").split(" ; "))
def test_an_argument_is_one_group_one_command_or_one_character(pair):
    text, expected = pair.split(" -> ")
    assert braced(text) == expected
    assert braced(expected).replace(r"\cdot \cdot ", r"\cdot ") == expected  # idempotent


@pytest.mark.parametrize("text", [*NO_TEX.strip().split(" ; "), "5\\"])
def test_what_is_no_tex_is_refused_and_equals_nothing(text):
    with pytest.raises(TexError):
        braced(text)
    assert not equivalent("5", text) and not equivalent("64", text)


# -- random expressions -----------------------------------------------------------------------------------------------

LEAVES = st.one_of(st.integers(1, 9), st.integers(10, 99)).map(lambda n: ("number", n))


def _tree(children):
    return st.one_of(
        st.tuples(st.just("frac"), children, children),
        st.tuples(st.just("product"), children, children),
        st.tuples(st.just("sum"), children, children),
        st.tuples(st.just("square"), children),
        st.tuples(st.just("root"), st.integers(1, 9)),  # of its square
        st.tuples(st.just("binom"), st.integers(2, 9), st.integers(1, 2)),
    )


TREES = st.recursive(LEAVES, _tree, max_leaves=5)


def value(tree) -> Fraction:
    kind, *parts = tree
    if kind in ("number", "root"):
        return Fraction(parts[0])
    if kind == "binom":
        return Fraction(comb(*parts))
    values = [value(part) for part in parts]
    if kind == "square":
        return values[0] ** 2
    return values[0] / values[1] if kind == "frac" else values[0] * values[1] if kind == "product" else sum(values)


def written(tree, draw) -> str:
    """The expression in TeX; `draw()` says whether an argument goes without braces where TeX allows that."""

    def argument(text):
        bare = len(text) == 1 and text.isalnum()
        return (" " if draw() else "") + text if bare and draw() else f"{{{text}}}"

    kind, *parts = tree
    if kind == "number":
        return str(parts[0])
    if kind == "root":
        return rf"\sqrt{argument(str(parts[0] ** 2))}"
    if kind == "binom":
        return rf"\binom{argument(str(parts[0]))}{argument(str(parts[1]))}"
    texts = [written(part, draw) for part in parts]
    if kind == "frac":
        return rf"\{'dt'[draw()] if draw() else ''}frac{argument(texts[0])}{argument(texts[1])}"
    if kind == "square":
        return f"({texts[0]})^{argument('2')}"
    return rf"({texts[0]})\cdot({texts[1]})" if kind == "product" else f"({texts[0]}+{texts[1]})"


@settings(max_examples=60, deadline=None)
@given(TREES, st.data())
def test_a_random_expression_has_one_reading_and_its_own_value(tree, data):
    bare = written(tree, lambda: data.draw(st.booleans()))
    full = written(tree, lambda: False)
    assert braced(bare).replace(" ", "") == braced(full).replace(" ", "")
    found = value(tree)
    if abs(found.numerator) < 10**9 and found.denominator < 10**9:
        assert equivalent(str(found), bare), (bare, found)
        assert not equivalent(str(found + 1), bare) and not equivalent(str(-found), bare)


@settings(max_examples=300, deadline=None)
@given(st.text("12ab^_{}()[]\\+- ", max_size=20) | st.text(max_size=30))
def test_no_text_breaks_the_reader_and_reading_twice_changes_nothing(text):
    try:
        once = braced(text)
    except TexError:
        return
    assert braced(once) == once
