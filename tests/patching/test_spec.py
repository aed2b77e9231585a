"""Test that the table's patches are valid together on each line, and that switches decide which are on."""

from dataclasses import replace

import pytest

from tests.patching.world import CLASS, FEATURE, row
from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.spec import validate
from verl_patches.patching.switches import Switches, parse_switches

PYPI_ONLY, A3_ONLY = frozenset({"pypi"}), frozenset({"a3"})
B, C = row("a.b"), row("a.c")
FAULTY = (
    # a row by itself
    ([B, B], "is used 2 times"),
    ([row("a.b", kind="steal")], "'steal'"),
    ([row("a.b", target="a b:c")], "'a b:c'"),
    ([row("a.b", target="a.b")], "expected stub for a target"),
    # needs
    ([replace(FEATURE, needs=())], "must list the subclass row"),
    ([row("a.b", needs=("x.y",))], "needs lists 'x.y'"),
    ([row("a.b", needs=("a.d",)), row("a.c", needs=("a.b",)), row("a.d", needs=("a.c",))], "a.b -> a.d -> a.c -> a.b"),
    ([B, row("a.c", "m", kind="stub", provider="o", needs=("a.b",))], "empty bindings and needs"),
    # rows on one place, whose order is not known
    ([B, C], "both on up.base:f"),
    ([B, row("a.c", kind="replace", needs=("a.b",))], "must be a wrap"),
    ([B, row("a.c", needs=("a.b",), bindings=("m:c",))], "the same bindings"),
    ([row("a.b", bindings=("m:c",)), row("a.c", "m:c")], "its binding m:c is the target of row 'a.c'"),
    ([row("a.b", "m:C"), row("a.c", "m:C.m")], "on m:C.m, inside m:C of row 'a.b'"),
    ([row("a.b", "m:C"), row("a.c", "m:C.TABLE", kind="register")], "on m:C.TABLE, inside"),
)
VALID = (
    [CLASS, FEATURE, replace(FEATURE, id="t.other")],
    [row("a.c", needs=("a.b",)), row("a.b", kind="replace")],  # the order of the table does not matter
    [B, row("a.c", needs=("a.b",)), row("a.d", needs=("a.c",))],
    [row("a.b", lines=PYPI_ONLY), row("a.c", lines=A3_ONLY)],
    [row("a.b", platforms=frozenset({"cpu"})), row("a.c", platforms=frozenset({"npu"}))],
    [row("a.b", kind="register"), row("a.c", kind="register")],
    [row("a.b", "m:C", kind="replace"), row("a.c", "m:C.m", kind="replace", needs=("a.b",))],
    [row("a.b", "m:C", needs=("a.c",)), row("a.c", "m:C.m", bindings=("o:m",))],
    [row("a.b", "m:C"), row("a.c", "m:Cs.m"), row("a.d", "n:C.m")],
    [row("a.b", "m", kind="stub", provider="o"), row("a.c", "m.n:f")],
)


@pytest.mark.parametrize(("rows", "words"), FAULTY)
def test_faulty_tables_are_refused(rows, words):
    with pytest.raises(ConfigError) as error:
        validate(rows)
    assert words in str(error.value)


@pytest.mark.parametrize("rows", VALID)
def test_rows_that_cannot_clash_are_valid(rows):
    assert list(validate(rows)) == [r.id for r in rows]


@pytest.mark.parametrize(("line", "bindings"), [("pypi", ("m:f", "m.new:f")), ("a3", ("m:f", "m.old:f"))])
def test_bindings_of_one_line_count_on_that_line_only(line, bindings):
    table = [row("t.f", bindings=("m:f", "m.old:f@a3", "m.new:f@pypi"))]
    assert Engine(table, Switches(line, "cpu")).specs["t.f"].bindings == bindings


def test_a_row_whose_need_is_off_or_of_another_line_is_refused():
    table = [row("t.late", "up.base:late", lines=A3_ONLY), row("t.over", "up.base:g", needs=("t.late",))]
    for switches in (Switches("a3", "cpu", ("-t.late",)), Switches("pypi", "cpu")):
        with pytest.raises(ConfigError, match=r"t\.over needs t\.late"):
            Engine(table, switches)


# -- switches ----------------------------------------------------------------------------------------------------------


def test_switch_text_round_trip_and_errors():
    for drift in ("", "drift=warn,"):
        text = f"line=pypi,platform=cpu,{drift}-reshard.*,+a.b"
        assert parse_switches(text).text() == text
    assert parse_switches("drift=strict") == Switches() == parse_switches("")
    for bad in ("platform=tpu", "nonsense", "+", "drift=ignore"):
        with pytest.raises(ConfigError, match="VERL_PATCHES"):
            parse_switches(bad)
    for pattern in ("-a.bce", "-*.CD"):  # like an id, and a part of it
        with pytest.raises(ConfigError, match=r"nearest: a\.bcd"):
            Engine([row("a.bcd")], parse_switches(f"line=pypi,platform=cpu,{pattern}"))


def test_which_rows_patterns_decide_and_why():
    """Check that a later pattern wins; a row of another line or platform cannot be switched on, nor is named as off."""
    rows = [row("a.b"), row("a.c", "a:c"), row("a.npu", "a:d", platforms=frozenset({"npu"}))]
    rows += [row("a.d", "a:e"), row("a.old", "a:f", lines=PYPI_ONLY)]
    switches = Switches("a3", "cpu", ("-a.*", "+a.c", "+a.npu"))
    assert switches.switched_off(rows) == ["a.b", "a.d"] and Switches("a3", "cpu").switched_off(rows) == []
    assert Switches("a3", "npu_emulated", ("-a.npu",)).switched_off(rows) == ["a.npu"]  # as on npu
    engine = Engine(rows, switches)
    reasons = {r["id"]: r["reason"] for r in engine.status()}
    assert engine.wanted == {"a.c"}
    assert (reasons["a.b"], reasons["a.c"]) == ("switched off by -a.*", "switched on by +a.c")
    assert (reasons["a.npu"], reasons["a.old"]) == ("not for platform cpu", "not for line a3")
