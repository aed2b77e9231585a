r"""Make data/deepscaler_sample.json: original maths problems in the DeepScaleR schema, byte-identical everywhere.

    python data/make_sample.py [--output FILE]

Each row is {problem, answer, solution}; the solution ends in \boxed{answer}. A template draws numbers and returns a
problem, its answer in LaTeX, the working, and a check: the answer computed in another way (by trying all candidates,
counting, or putting the answer back). A row whose check is false stops the script.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from fractions import Fraction
from itertools import product
from pathlib import Path
from random import Random
from typing import NamedTuple

SAMPLE = Path(__file__).resolve().parent / "deepscaler_sample.json"
ROWS_PER_TEMPLATE = 13
SEED = 20250807


class Item(NamedTuple):
    """Hold one problem: `answer` is LaTeX, `working` the text before the box, `check` whether another method agrees."""

    problem: str
    answer: str
    working: str
    check: bool


def draw(rng: Random, low: int, high: int) -> int:
    """Return a random integer in low..high, ends included."""
    return low + rng.randrange(high - low + 1)


def pick(rng: Random, *choices: str) -> str:
    """Return one of the choices at random."""
    return choices[rng.randrange(len(choices))]


def frac(value: Fraction) -> str:
    r"""Return a fraction in lowest terms as LaTeX: 3, -2, \frac{3}{4}, -\frac{3}{4}."""
    if value.denominator == 1:
        return str(value.numerator)
    return f"{'-' if value < 0 else ''}\\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"


def plus(value: int, name: str = "") -> str:
    """Return a further term of a sum: " + 3x", " - x", " - 3", or "" for 0."""
    if value == 0:
        return ""
    size = "" if abs(value) == 1 and name else abs(value)
    return f" {'+' if value > 0 else '-'} {size}{name}"


def shop(rng: Random) -> Item:
    who, what = pick(rng, "Mira", "Jonas", "Aiko", "Tariq"), pick(rng, "notebooks", "oranges", "tickets", "candles")
    n, price = draw(rng, 3, 12), draw(rng, 4, 19)
    paid = n * price + draw(rng, 1, 60)
    left = paid - n * price
    return Item(
        f"{who} buys {n} {what} at {price} coins each and pays with {paid} coins. How many coins come back?",
        str(left),
        f"The {what} cost ${n} \\cdot {price} = {n * price}$ coins; ${paid} - {n * price} = {left}$ come back.",
        sum([price] * n) + left == paid,
    )


def share(rng: Random) -> Item:
    a, b, unit = draw(rng, 2, 9), draw(rng, 2, 9), draw(rng, 6, 40)
    total, bigger = (a + b) * unit, max(a, b) * unit
    return Item(
        f"Two villages share {total} litres of water in the ratio {a}:{b}. How many litres does the larger share hold?",
        str(bigger),
        f"One part is ${total} / ({a} + {b}) = {unit}$ litres, and the larger share has {max(a, b)} parts.",
        any({x, total - x} == {a * unit, b * unit} and x >= total - x and x == bigger for x in range(total + 1)),
    )


def add_fractions(rng: Random) -> Item:
    x, y = Fraction(draw(rng, 1, 7), draw(rng, 2, 9)), Fraction(draw(rng, 1, 7), draw(rng, 2, 9))
    answer = x - y / 2
    return Item(
        f"A map gives the summit as ${frac(x)}$ miles above the hut and the bridge as half of ${frac(y)}$ miles above "
        "it. How many miles is the summit above the bridge? Give a fraction in lowest terms, negative if it is below.",
        frac(answer),
        f"Half of ${frac(y)}$ is ${frac(y / 2)}$, and ${frac(x)} - {frac(y / 2)} = {frac(answer)}$.",
        math.isclose(float(x) - 0.5 * float(y), float(answer), abs_tol=1e-12),
    )


def decimals(rng: Random) -> Item:
    length, width = draw(rng, 11, 99), draw(rng, 11, 99)  # tenths
    area = Fraction(length * width, 100)
    text = f"{length * width // 100}.{length * width % 100:02d}".rstrip("0").rstrip(".")
    return Item(
        f"A rectangle is {length / 10:.1f} m long and {width / 10:.1f} m wide. "
        "What is its area in square metres, as a decimal?",
        text,
        f"${length / 10:.1f} \\cdot {width / 10:.1f} = {text}$.",
        Fraction(text) == area,
    )


def temperature(rng: Random) -> Item:
    start, fall, hours = draw(rng, -4, 6), draw(rng, 2, 5), draw(rng, 3, 8)
    end = start - fall * hours
    return Item(
        f"At dusk it is {start} degrees. The temperature falls by {fall} degrees every hour. "
        f"How many degrees is it after {hours} hours?",
        str(end),
        f"${start} - {fall} \\cdot {hours} = {end}$.",
        start - sum([fall] * hours) == end,
    )


def meeting(rng: Random) -> Item:
    v, w, t = draw(rng, 30, 80), draw(rng, 30, 80), Fraction(draw(rng, 3, 11), 2)
    gap = (v + w) * t
    return Item(
        f"Two trains {float(gap):g} km apart leave at the same time towards each other at {v} km/h and {w} km/h. "
        "After how many hours do they meet?",
        frac(t),
        f"They close ${v} + {w} = {v + w}$ km an hour and meet after ${float(gap):g} / {v + w} = {frac(t)}$ hours.",
        v * t == gap - w * t,
    )


def work(rng: Random) -> Item:
    a, b = draw(rng, 2, 12), draw(rng, 3, 15)
    t = Fraction(a * b, a + b)
    return Item(
        f"One pump fills a pool in {a} hours, another in {b} hours. How many hours do both take together?",
        frac(t),
        f"In an hour they fill $\\frac{{1}}{{{a}}} + \\frac{{1}}{{{b}}} = {frac(1 / t)}$ of it.",
        t / a + t / b == 1,
    )


def percent(rng: Random) -> Item:
    base, rate = 20 * draw(rng, 3, 30), 5 * draw(rng, 1, 15)
    new = base * (100 - rate) // 100
    return Item(
        f"A coat costs {base} coins. In a sale the price drops to {new} coins. By what percentage has it dropped?",
        f"{rate}\\%",
        f"The drop is {base - new} coins, and $\\frac{{{base - new}}}{{{base}}} = {rate}\\%$.",
        [p for p in range(101) if base * (100 - p) == 100 * new] == [rate],
    )


def circle(rng: Random) -> Item:
    r, cut = draw(rng, 3, 15), draw(rng, 1, 2)
    area = r * r - cut * cut
    strip = sum(2 * math.pi * (cut + (i + 0.5) * (r - cut) / 2000) * (r - cut) / 2000 for i in range(2000))
    return Item(
        f"A round table top has radius {r} dm. A round hole of radius {cut} dm is cut from its middle. "
        "What area in square decimetres is left? Give an exact answer.",
        f"{area}\\pi",
        f"$\\pi \\cdot {r}^2 - \\pi \\cdot {cut}^2 = {area}\\pi$.",
        math.isclose(strip, area * math.pi, rel_tol=1e-6),
    )


def diagonal(rng: Random) -> Item:
    a, b = draw(rng, 2, 14), draw(rng, 2, 14)
    square = a * a + b * b
    out = max(k for k in range(1, 21) if square % (k * k) == 0)
    rest = square // (out * out)
    answer = str(out) if rest == 1 else f"{'' if out == 1 else out}\\sqrt{{{rest}}}"
    return Item(
        f"How long is the diagonal of a field that is {a} units by {b} units? Give an exact answer, simplified.",
        answer,
        f"The diagonal is $\\sqrt{{{a}^2 + {b}^2}} = \\sqrt{{{square}}}$ units long.",
        math.isclose(out * math.sqrt(rest), math.hypot(a, b)),
    )


def right_triangle(rng: Random) -> Item:
    m, n, k = draw(rng, 3, 7), draw(rng, 1, 2), draw(rng, 1, 4)
    legs, hyp = (k * (m * m - n * n), k * 2 * m * n), k * (m * m + n * n)
    return Item(
        f"A right triangle has a hypotenuse of {hyp} cm and one leg of {legs[0]} cm. "
        "What is its area in square centimetres?",
        str(legs[0] * legs[1] // 2),
        f"The other leg is $\\sqrt{{{hyp}^2 - {legs[0]}^2}} = {legs[1]}$ cm; half the product of the legs is the area.",
        [b for b in range(1, hyp) if legs[0] ** 2 + b * b == hyp * hyp] == [legs[1]],
    )


def remainder(rng: Random) -> Item:
    base, power, mod = draw(rng, 2, 9), draw(rng, 12, 60), draw(rng, 5, 13)
    value = 1
    for _ in range(power):
        value = value * base % mod
    return Item(
        f"What is the remainder when ${base}^{{{power}}}$ is divided by {mod}?",
        str(pow(base, power, mod)),
        f"The remainders of powers of {base} modulo {mod} repeat; counting to the exponent {power} gives {value}.",
        base**power % mod == value == pow(base, power, mod),
    )


def gcd_tiles(rng: Random) -> Item:
    g, a, b = draw(rng, 4, 18), draw(rng, 3, 14), draw(rng, 3, 14)
    x, y = g * a, g * b
    side = math.gcd(x, y)
    return Item(
        f"A floor of {x} cm by {y} cm is to be covered with equal square tiles, as large as possible, none cut. "
        "How many tiles are needed?",
        str((x // side) * (y // side)),
        f"The side is $\\gcd({x}, {y}) = {side}$ cm, so ${x // side} \\cdot {y // side}$ tiles are needed.",
        max(s for s in range(1, min(x, y) + 1) if x % s == 0 and y % s == 0) == side,
    )


def buses(rng: Random) -> Item:
    a, b, c = draw(rng, 4, 12), draw(rng, 6, 15), draw(rng, 8, 20)
    wait = math.lcm(a, b, c)
    return Item(
        f"Three buses leave a stop together and then every {a}, {b} and {c} minutes. "
        "After how many minutes do all three next leave together?",
        str(wait),
        f"The least common multiple of {a}, {b} and {c} is {wait}.",
        next(t for t in range(1, a * b * c + 1) if t % a == t % b == t % c == 0) == wait,
    )


def divisors(rng: Random) -> Item:
    p, q = draw(rng, 1, 4), draw(rng, 1, 3)
    n = 2**p * 3**q * (5, 7, 11, 13)[rng.randrange(4)]
    return Item(
        f"How many positive divisors does {n} have?",
        str((p + 1) * (q + 1) * 2),
        f"Its prime factors have the exponents {p}, {q} and 1: ${p + 1} \\cdot {q + 1} \\cdot 2$ divisors.",
        sum(n % d == 0 for d in range(1, n + 1)) == (p + 1) * (q + 1) * 2,
    )


def dice(rng: Random) -> Item:
    sides = draw(rng, 4, 10)
    total = draw(rng, 3, 2 * sides - 1)
    hits = sides - abs(sides + 1 - total)
    return Item(
        f"Two fair dice with {sides} faces each, numbered from 1, are thrown. "
        f"What is the probability that the sum is {total}? Give a fraction in lowest terms.",
        frac(Fraction(hits, sides * sides)),
        f"Of the ${sides}^2 = {sides * sides}$ equally likely throws, {hits} have that sum.",
        sum(x + y == total for x, y in product(range(1, sides + 1), repeat=2)) == hits,
    )


def committee(rng: Random) -> Item:
    n, k = draw(rng, 5, 10), draw(rng, 2, 4)
    ways = math.comb(n, k)
    return Item(
        f"In how many ways can a choir of {n} singers choose {k} of them for the first row, order not counting?",
        str(ways),
        f"$\\binom{{{n}}}{{{k}}} = {ways}$.",
        sum(bin(mask).count("1") == k for mask in range(2**n)) == ways,
    )


def quadratic_roots(rng: Random) -> Item:
    r, s = draw(rng, -9, 9), draw(rng, -9, 9)
    r, s = min(r, s), max(r, s) + (r == s)
    b, c = -(r + s), r * s
    poly = f"x^2{plus(b, 'x')}{plus(c)}"
    return Item(
        f"Find the set of all real solutions of ${poly} = 0$.",
        f"\\{{{r}, {s}\\}}",
        f"The polynomial is $(x - ({r}))(x - ({s}))$.",
        [x for x in range(-50, 51) if x * x + b * x + c == 0] == [r, s],
    )


def inequality(rng: Random) -> Item:
    a, b, c = draw(rng, 2, 7), draw(rng, -15, 15), draw(rng, -15, 20)
    edge = Fraction(c - b, a)
    strict = rng.randrange(2)
    sign, tail = ("<", ")") if strict else ("\\le", "]")
    near = Fraction(1, 1000)
    return Item(
        f"Solve ${a}x{plus(b)} {sign} {c}$ for real $x$. Give the solutions as an interval.",
        f"(-\\infty, {frac(edge)}{tail}",
        f"${a}x {sign} {c - b}$, so $x {sign} {frac(edge)}$.",
        a * (edge - near) + b < c < a * (edge + near) + b and a * edge + b == c,
    )


def absolute(rng: Random) -> Item:
    mid, reach = draw(rng, -8, 8), draw(rng, 2, 12)
    low, high = mid - reach, mid + reach
    return Item(
        f"Which real numbers $x$ satisfy $|x{plus(-mid)}| \\le {reach}$? Give the answer as an interval.",
        f"[{low}, {high}]",
        f"The distance of $x$ from ${mid}$ is at most {reach}.",
        [x for x in range(-60, 61) if abs(x - mid) <= reach] == list(range(low, high + 1)),
    )


def line(rng: Random) -> Item:
    x, y, m = draw(rng, -6, 6), draw(rng, -6, 6), draw(rng, 2, 5)
    k = draw(rng, 1, 6)
    b, d = y - m * x, y + k * x  # y = m x + b and y = -k x + d
    return Item(
        f"Where do the lines $y = {m}x{plus(b)}$ and $y{plus(k, 'x')} = {d}$ cross? Give the point $(x, y)$.",
        f"({x}, {y})",
        f"Putting the first into the second leaves one equation for $x$, which gives $x = {x}$ and then $y = {y}$.",
        [(u, m * u + b) for u in range(-40, 41) if m * u + b + k * u == d] == [(x, y)],
    )


def expand(rng: Random) -> Item:
    a, b, c = draw(rng, 2, 5), draw(rng, -6, 6) or 1, draw(rng, 1, 7)
    middle, last = a * c + b, b * c
    return Item(
        f"Expand $({a}x{plus(b)})(x + {c})$.",
        f"{a}x^2{plus(middle, 'x')}{plus(last)}",
        "Multiply each term of the first bracket by each term of the second and collect.",
        all((a * x + b) * (x + c) == a * x * x + middle * x + last for x in range(-5, 6)),
    )


def series(rng: Random) -> Item:
    first, step, n = draw(rng, 1, 12), draw(rng, 2, 9), draw(rng, 8, 30)
    total = n * (2 * first + (n - 1) * step) // 2
    return Item(
        f"A theatre has {n} rows. The first row has {first} seats and each further row has {step} more than the one "
        "before. How many seats are there?",
        str(total),
        f"$\\frac{{{n}}}{{2}} (2 \\cdot {first} + {n - 1} \\cdot {step}) = {total}$.",
        sum(range(first, first + step * n, step)) == total,
    )


def mixture(rng: Random) -> Item:
    a, b = 10 * draw(rng, 1, 4), 10 * draw(rng, 5, 9)
    x, y = draw(rng, 1, 9), draw(rng, 1, 9)
    strength = Fraction(a * x + b * y, 100 * (x + y))
    return Item(
        f"{x} litres of {a}% syrup are mixed with {y} litres of {b}% syrup. "
        "What fraction of the mixture is pure syrup, in lowest terms?",
        frac(strength),
        f"There are ${frac(Fraction(a * x, 100))} + {frac(Fraction(b * y, 100))}$ litres of syrup in {x + y} litres.",
        strength * (x + y) * 100 == a * x + b * y,
    )


TEMPLATES: tuple[Callable[[Random], Item], ...] = (
    *(shop, share, add_fractions, decimals, temperature, meeting, work, percent),
    *(circle, diagonal, right_triangle, remainder, gcd_tiles, buses, divisors, dice),
    *(committee, quadratic_roots, inequality, absolute, line, expand, series, mixture),
)


def make_rows(templates: tuple[Callable[[Random], Item], ...] = TEMPLATES) -> list[dict[str, str]]:
    """Return the rows of the sample, one of each template in turn, without repeated problems.

    Raises ValueError if a template's own check contradicts its answer, or if a template cannot give enough rows.
    """
    rng, rows = Random(SEED), {}
    for template in templates * ROWS_PER_TEMPLATE:
        for _attempt in range(200):
            item = template(rng)
            if not item.check:
                raise ValueError(
                    f"{template.__name__}: its check contradicts the answer {item.answer!r} of {item.problem!r}"
                )
            if item.problem not in rows:
                break
        else:
            raise ValueError(
                f"{template.__name__}: expected {ROWS_PER_TEMPLATE} different problems, found fewer in 200 draws"
            )
        solution = f"{item.working} The answer is $\\boxed{{{item.answer}}}$."
        rows[item.problem] = {"problem": item.problem, "answer": item.answer, "solution": solution}
    return list(rows.values())


def main() -> int:
    """Write the sample and return the exit code."""
    parser = argparse.ArgumentParser(description="Make the sample of maths word problems.")
    parser.add_argument("--output", type=Path, default=SAMPLE, help=f"file to write (default: {SAMPLE.name})")
    args = parser.parse_args()
    rows = make_rows()
    args.output.write_text(json.dumps(rows, indent=2, ensure_ascii=True) + "\n", encoding="utf-8", newline="\n")
    print(f"{len(rows)} rows -> {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
