"""What differs between lines inside one row: bindings and needs; and other libraries that may go over a row."""

import json
from dataclasses import replace

import pytest

from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.spec import LINES, PatchSpec, validate
from verl_patches.patching.switches import Switches


def row(**more):
    return PatchSpec(
        **{
            "id": "t.f",
            "stage": "model",
            "target": "up.base:f",
            "kind": "wrap",
            "provider": "ours:louder",
            "why": "test",
            "exit": "no",
            **more,
        }
    )


BOUND = row(bindings=("up.user:f", "up.old:f@a3", "up.new:f@pypi"))


@pytest.mark.parametrize(("line", "bindings"), [("pypi", ("up.user:f", "up.new:f")), ("a3", ("up.user:f", "up.old:f"))])
def test_a_binding_of_one_line_is_seen_on_that_line_only(line, bindings):
    assert BOUND.on_line(line).bindings == bindings
    assert Engine([BOUND], Switches(line, "cpu")).specs["t.f"].bindings == bindings
    assert row().on_line(line) == row()


def test_a_row_that_names_no_line_is_on_in_production():
    everywhere = PatchSpec(
        id="t.f", stage="model", target="up.base:f", kind="wrap", provider="ours:louder", why="test", exit="no"
    )
    for line in LINES:
        assert Engine([everywhere], Switches(line)).wanted == {"t.f"}
    assert Engine([replace(everywhere, lines=frozenset({"pypi"}))], Switches()).wanted == set()  # control


@pytest.mark.parametrize(
    ("binding", "words"), [("up.user:f@a4", "is for line 'a4'"), ("up.user f@a3", "not of the form")]
)
def test_a_line_or_place_that_does_not_exist_is_refused(binding, words):
    with pytest.raises(ConfigError, match=words):
        validate([row(bindings=(binding,))])
    with pytest.raises(ConfigError, match="which the row is not for"):
        validate([row(bindings=("up.user:f@a3",), lines=frozenset({"pypi"}))])


TABLE = (
    row(),
    row(id="t.late", target="up.base:late", lines=frozenset({"a3"})),
    row(id="t.over", needs=("t.f", "t.late@a3"), target="up.base:g"),
)


@pytest.mark.parametrize(("line", "needs"), [("pypi", ("t.f",)), ("a3", ("t.f", "t.late"))])
def test_a_need_of_one_line_counts_on_that_line_only(line, needs):
    assert Engine(TABLE, Switches(line, "cpu")).specs["t.over"].needs == needs


def test_a_need_that_is_off_stops_its_own_line_only():
    off = {"patterns": ("-t.late",)}
    assert Engine(TABLE, Switches("pypi", "cpu", **off)).wanted == {"t.f", "t.over"}
    with pytest.raises(ConfigError, match=r"t\.over needs t\.late"):
        Engine(TABLE, Switches("a3", "cpu", **off))


def test_a_need_orders_two_rows_on_one_target_on_its_own_line_only():
    lower = row(id="t.low", lines=frozenset({"a3"}))
    upper = row(needs=("t.low@a3",))
    assert list(validate([lower, upper])) == ["t.low", "t.f"]  # on pypi the target has one row
    with pytest.raises(ConfigError, match="both on up.base:f"):  # control: now there are two, and no order
        validate([replace(lower, lines=frozenset({"pypi", "a3"})), upper])


@pytest.mark.parametrize(
    ("need", "words"),
    [
        ("t.late", "needs 't.late' on line pypi, which that row is not for"),
        ("t.late@a4", "is for line 'a4'"),
        ("t.gone@a3", "'t.gone', which is no row"),
        ("t.over@a3", "cycle: t.over -> t.over"),
    ],
)
def test_a_need_that_its_line_lacks_is_refused(need, words):
    with pytest.raises(ConfigError, match=words):
        validate([*TABLE[:2], replace(TABLE[2], needs=(need,))])


FILES = {
    "base.py": "def f(x): return x\n",
    "ours.py": "import functools\ndef louder(original):\n    @functools.wraps(original)\n"
    "    def ours(*a): return f'{original(*a)}!'\n    return ours\n",
    "theirs.py": "import functools\ndef wrapper(fn):\n    @functools.wraps(fn)\n    def over(*a): return fn(*a)\n"
    "    return over\ndef other(x): return x\n",
}
CODE = """
import json, sys, base, theirs
from verl_patches.patching.engine import Engine
from verl_patches.patching.spec import PatchSpec
from verl_patches.patching.switches import parse
spec = PatchSpec(id="t.f", stage="model", target="base:f", kind="wrap", provider="ours:louder", why="t", exit="no",
                 under=tuple(sys.argv[2:]))
engine = Engine([spec], parse("line=pypi,platform=cpu")); engine.apply()
base.f = eval(sys.argv[1])
print(json.dumps([engine.status()[0]["state"], base.f(1)]))
"""


@pytest.mark.parametrize(
    ("put", "under", "found"),
    [
        ("theirs.wrapper(base.f)", ["theirs"], ["active", "1!"]),
        ("theirs.wrapper(base.f)", [], ["overridden", "1!"]),
        ("theirs.wrapper(base.f)", ["others"], ["overridden", "1!"]),
        ("theirs.wrapper(theirs.other)", ["theirs"], ["overridden", 1]),
        ("theirs.other", ["theirs"], ["overridden", 1]),
    ],
)
def test_a_named_library_may_wrap_a_row_but_not_replace_it(run_python, tmp_path, put, under, found):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    done = run_python(CODE, put, *under, env={"PYTHONPATH": str(tmp_path)}).check()
    assert json.loads(done.out) == found
