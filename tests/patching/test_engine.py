"""The patch engine on a small upstream package, each order of events in a fresh interpreter."""

from dataclasses import replace

import pytest

from tests.patching.world import CLASS, FEATURE, row
from verl_patches.errors import ConfigError
from verl_patches.patching.engine import Engine
from verl_patches.patching.signatures import signature_faults
from verl_patches.patching.spec import LINES, validate
from verl_patches.patching.switches import Switches, nearest_rows, parse

PYPI_ONLY, A3_ONLY = frozenset({"pypi"}), frozenset({"a3"})


@pytest.mark.parametrize("order", ["apply import", "import apply", "user apply", "apply user", "apply apply user"])
def test_orders_of_import_and_apply(play, order):
    steps = {"apply": "e.apply()", "import": "import up.base", "user": "import up.user"}
    out = play(f"""
        e = engine(F)
        {"; ".join(steps[step] for step in order.split())}
        import up.user
        out = [up.user.f(1), proof(e)]
        e.revert(); out += [up.user.f(1), states(e)["t.f"]]
        e.apply(); out += [up.user.f(1)]
    """)
    assert out == ["1!", None, 1, "reverted", "1!"]


@pytest.mark.parametrize("rows", ["F, OVER", "OVER, F"])
def test_a_row_goes_over_the_row_that_it_needs_whichever_hook_runs_first(play, rows):
    """Where an import ends while apply() adds hooks, that of the upper row can come first."""
    out = play(f"""
        from verl_patches.patching import hooks
        take = hooks._take
        hooks._take = lambda name: take(name)[::-1]
        e = engine({rows})
        e.apply()
        import up.user
        out = [proof(e), up.user.f(1)]
        e.revert(); out += [up.base.f(1), up.user.f(1)]
        e.apply(); out += [proof(e), up.base.f(1)]
    """)
    assert out == [None, "1!?", 1, 1, None, "1!?"]


def test_an_installed_package_is_used_in_place_of_its_stub(play):
    out = play("""
        e = engine(row("t.stub", "up", "stub", "standin_mod"), row("t.gone", "no_such_package", "stub", "standin_mod"))
        out = [proof(e)]
        e.apply()
        out += [states(e), proof(e)]
    """)
    before, states, after = out
    assert "t.gone is off" in before and "t.stub" not in before  # the control: nothing was applied
    assert states == {"t.stub": "off", "t.gone": "active"} and after is None


@pytest.mark.parametrize(("provider", "inner"), [("standin_mod", "inner.deep"), ("standin_mod:object_", "deep")])
def test_modules_inside_a_stub_can_be_imported_and_others_cannot(play, provider, inner):
    out = play(f"""
        import importlib
        e = engine(row("t.stub", "no_such", "stub", "{provider}")); e.apply()
        out = [importlib.import_module("no_such.{inner}").answer, states(e)["t.stub"]]
        for other in ("no_such.answer", "no_such.other", "no_such.{inner}.answer"):
            out.append(tried(lambda: importlib.import_module(other)).partition(":")[0])
        e.revert()
        out.append([name for name in sys.modules if name.startswith("no_such")])
        engine(row("t.stub", "no_such", "stub", "standin_mod:answer")).apply()
        try: import no_such
        except RuntimeError as error: out.append(str(error))
    """)
    assert out[:-1] == [43, "active", *["ModuleNotFoundError"] * 3, []] and "is no module" in out[-1]


def test_every_kind_of_target(play):
    out = play("""
        rows = [row("t.m", "up.base:Thing.m"), row("t.st", "up.base:Thing.st"), row("t.cl", "up.base:Thing.cl"),
                row("t.prop", "up.base:Thing.prop"), row("t.value", "up.base:NOTHING", "replace", "ours:VALUE"),
                row("t.new", "up.base:added", "extend", "ours:VALUE"),
                row("t.reg", "up.base:TABLE", "register", "ours:entries"),
                row("t.stub", "no_such_package", "stub", "standin_mod")]
        e = engine(*rows); e.apply()
        import up.base as b, ours, no_such_package
        def seen():
            t = b.Thing()
            return [t.m(), t.st("x"), b.Thing.st("y"), b.Thing.cl(), t.prop, dict(b.TABLE)]
        out = [[*seen(), b.NOTHING is b.added is ours.VALUE, no_such_package.answer], proof(e)]
        e.revert()
        out += [seen(), b.NOTHING is None, hasattr(b, "added")]
        out.append(tried(lambda: __import__("no_such_package")))
    """)
    assert out[0] == ["m!", "x!", "y!", "Thing!", "1!", {"a": 1, "b": 2}, True, 42] and out[1] is None
    assert out[2:5] == [["m", "x", "y", "Thing", 1, {"a": 1}], True, False] and out[5].startswith("ModuleNotFound")


def test_a_target_that_is_half_built_waits(play, tree):
    (tree / "ours_prelude.py").write_text(
        "import __main__, up.worker\n__main__.e.apply()\n__main__.early = __main__.states(__main__.e)\n"
    )
    out = play("""
        e = engine(row("t.work", "up.worker:work"))
        import up.worker
        out = [early, up.worker.work(1), states(e)]
    """)
    assert out == [{"t.work": "waiting"}, "1!", {"t.work": "active"}]


def test_an_import_error_of_a_hook_stops_every_import(play):
    """Upstream swallows an ImportError, so the import must raise another error."""
    out = play("""
        from verl_patches.patching import hooks
        def fail(module): raise ImportError("no such thing")
        hooks.after_import("up.base", fail)
        out = []
        for _ in range(2):
            try: import up.base
            except RuntimeError as error: out.append([type(error).__name__, str(error), "up.base" in sys.modules])
    """)
    assert out == [["HookError", "patching up.base failed: no such thing", False]] * 2


def test_a_waiting_row_fails_verify_only_in_its_own_process(play):
    out = play("""
        e = engine(row("t.f", processes=frozenset({"worker"}))); e.apply()
        out = [tried(lambda: e.verify("controller")), proof(e)]
    """)
    assert out[0] is None and "t.f is waiting" in out[1]


def test_a_body_that_changed_since_its_review_stops_the_import(play):
    out = play("""
        import pathlib
        known = fingerprint.fingerprint("up.base:f")
        fingerprint.reviewed_hash = lambda line, target: known if target == "up.base:f" else None
        e = engine(F); e.apply()
        import up.base
        out = [states(e)["t.f"], known]
        e.revert(); del sys.modules["up.base"]
        file = pathlib.Path(up.base.__file__)
        file.write_text(file.read_text().replace("f(x): return x", "f(x): return 2"))
        e.apply()
        out.append(tried(lambda: __import__("up.base")))
    """)
    assert out[0] == "active" and out[1] in out[2] and "t.f" in out[2]


# -- rows of kind subclass and override --------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "then"), [("e.apply()", "import up.base"), ("import up.base", "e.apply()")])
def test_methods_go_over_upstreams_under_its_name_and_come_out_again(play, first, then):
    out = play(f"""
        import pickle
        e = engine(CLASS, FEATURE)
        {first}
        {then}
        thing, upstream = up.base.Thing, up.base.Thing.__mro__[2]
        out = [thing().m(), thing.__module__, thing.__qualname__, pickle.loads(pickle.dumps(thing)) is thing]
        out += [proof(e), list(states(e).values())]
        e.revert()
        out += [up.base.Thing is upstream, up.base.Thing().m()]
    """)
    assert out == ["m and ours", "up.base", "Thing", True, None, ["active"] * 2, True, "m"]


def test_a_feature_is_switched_off_by_itself_and_the_class_only_with_it(play):
    out = play("""
        e = engine(CLASS, FEATURE, text="-t.feature"); e.apply()
        import up.base
        out = [up.base.Thing().m(), states(e)["t.feature"], proof(e)]
        out.append(tried(lambda: engine(CLASS, FEATURE, text="-t.class")))
    """)
    assert out[:3] == ["m", "off", None] and "t.feature needs t.class" in out[3]


def test_an_override_of_another_method_is_failed_and_one_without_its_class_in_place_is_unsupported(play):
    out = play("""
        def imported(*rows):
            e = engine(*rows); e.apply()
            error = tried(lambda: __import__("up.base"))
            e.revert()
            return error
        wrong = row("t.wrong", "up.base:Thing.m", "override", "ours:NotOver.m", needs=("t.class",))
        out = [imported(CLASS, wrong)]
        elsewhere = row("t.class", "up.other:Thing", "subclass", "ours:OurThing")
        out.append(imported(elsewhere, FEATURE))
        e = engine(elsewhere, FEATURE, text="drift=skip"); e.apply()
        import up.base
        out.append(look(e)["t.feature"])
    """)
    assert "row t.wrong" in out[0] and "fault of this recipe" in out[0] and "OurThing.m" in out[0]
    assert "upstream here does not take it: it needs t.class, which is waiting" in out[1]
    assert out[2] == ["unsupported", "it needs t.class, which is waiting and was not applied"]


def test_an_override_needs_a_subclass_row_and_two_may_share_a_method():
    assert set(validate([CLASS, FEATURE, replace(FEATURE, id="t.other")])) == {"t.class", "t.feature", "t.other"}
    with pytest.raises(ConfigError, match="override must name the subclass row"):
        validate([replace(FEATURE, needs=())])


@pytest.mark.parametrize(("name", "faults"), [("OurThing", 0), ("Narrow", 1)])
def test_signatures_of_a_subclass_are_compared_method_by_method(tree, monkeypatch, name, faults):
    monkeypatch.syspath_prepend(tree)
    found = signature_faults(replace(CLASS, provider=f"ours:{name}"), tree)
    assert len(found) == faults and all(fault.startswith("m ") for fault in found), found


# -- catalogue and switches --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row("a.b"), row("a.b")], "is used 2 times"),
        ([row("A b")], "id must look like"),
        ([row("a.b", kind="steal")], "kind is 'steal'"),
        ([row("a.b", target="a b:c")], "not of the form"),
        ([row("a.b", target="a.b")], "target without ':'"),
        ([row("a.b", needs=("x.y",))], "which is no row"),
        ([row("a.b", needs=("a.c",)), row("a.c", needs=("a.b",))], "cycle: a.b -> a.c -> a.b"),
        ([row("a.b", platforms=frozenset({"tpu"}))], "platforms is"),
        ([replace(row("a.b"), why="")], "must not be empty"),
        ([row("a.b", bindings=("up.user:f@a4",))], "is for line 'a4'"),
        ([row("a.b", bindings=("up.user f@a3",))], "not of the form"),
        ([row("a.b", bindings=("up.user:f@a3",), lines=PYPI_ONLY)], "which the row is not for"),
    ],
)
def test_faulty_catalogues_are_refused(rows, words):
    with pytest.raises(ConfigError, match="nothing was applied") as error:
        validate(rows)
    assert words in str(error.value)


def test_switch_text_round_trip_and_errors():
    for drift in ("", "drift=warn,", "drift=skip,"):
        text = f"line=pypi,platform=cpu,{drift}-reshard.*,+a.b"
        assert parse(text).text() == text
    assert parse("drift=strict") == Switches() == parse("")
    for bad in ("platform=tpu", "nonsense", "+", "line", "line=pypi,line=a3", "line=a3,line=a3", "drift=ignore"):
        with pytest.raises(ConfigError, match="VERL_PATCHES"):
            parse(bad)
    with pytest.raises(ConfigError, match="nearest: a.bcd"):
        Engine([row("a.bcd")], parse("line=pypi,platform=cpu,-a.bce"))


NEAR = (
    row("a.mla_size", provider="ours:asking"),
    row("b.size", "up.base:Mla.m"),
    row("c.other", "up.base:g", provider="ours:same"),
)


@pytest.mark.parametrize(
    ("name", "suggested"),
    [
        ("mla", "; nearest: a.mla_size, b.size"),  # an id that contains it, then a target
        ("louder", "; nearest: b.size"),
        ("c.othre", "; nearest: c.other"),
        ("b.siz.*", "; nearest: b.size"),
        ("zzz", ""),
        ("*", ""),
    ],
)
def test_suggested_rows_are_related_to_the_name(name, suggested):
    assert nearest_rows(name, {spec.id: spec for spec in NEAR}) == suggested
    with pytest.raises(ConfigError) as error:
        Engine(NEAR, Switches()).explain(name)
    assert f"no row {name!r}{suggested}. `python" in str(error.value)


def test_rows_that_a_pattern_switches_off_are_named_and_those_of_other_lines_are_not():
    rows = [row("a.b"), row("a.c", "a:c"), row("a.npu", "a:d", platforms=frozenset({"npu"}))]
    rows += [row("a.d", "a:e"), row("a.old", "a:f", lines=PYPI_ONLY)]
    switches = Switches("a3", "cpu", ("-a.*", "+a.c"))
    assert switches.switched_off(rows) == ["a.b", "a.d"] and Switches("a3", "cpu").switched_off(rows) == []
    assert Switches("a3", "npu_emulated", ("-a.npu",)).switched_off(rows) == ["a.npu"]  # as on npu
    reasons = {r["id"]: r["reason"] for r in Engine(rows, switches).status()}
    assert (reasons["a.b"], reasons["a.c"]) == ("switched off by -a.*", "switched on by +a.c")
    assert (reasons["a.npu"], reasons["a.old"]) == ("not for platform cpu", "not for line a3")


def test_a_later_pattern_wins_and_a_platform_cannot_be_switched_on():
    rows = [row("a.b"), row("a.c", "a:c"), row("a.npu", "a:d", platforms=frozenset({"npu"}))]
    assert Engine(rows, parse("line=pypi,platform=cpu,-a.*,+a.c,+a.npu")).wanted == {"a.c"}


def test_a_row_that_names_no_line_is_on_in_production():
    assert all(Engine([row("t.f")], Switches(line)).wanted == {"t.f"} for line in LINES)
    assert Engine([row("t.f", lines=PYPI_ONLY)], Switches()).wanted == set()  # control


TABLE = (
    row("t.f", bindings=("up.user:f", "up.old:f@a3", "up.new:f@pypi")),
    row("t.late", "up.base:late", lines=A3_ONLY),
    row("t.over", "up.base:g", needs=("t.f", "t.late@a3")),
)


@pytest.mark.parametrize(
    ("line", "bindings", "needs"),
    [("pypi", ("up.user:f", "up.new:f"), ("t.f",)), ("a3", ("up.user:f", "up.old:f"), ("t.f", "t.late"))],
)
def test_bindings_and_needs_of_one_line_count_on_that_line_only(line, bindings, needs):
    specs = Engine(TABLE, Switches(line, "cpu")).specs
    assert specs["t.f"].bindings == bindings and specs["t.over"].needs == needs


def test_a_need_that_is_off_stops_its_own_line_only():
    off = {"patterns": ("-t.late",)}
    assert Engine(TABLE, Switches("pypi", "cpu", **off)).wanted == {"t.f", "t.over"}
    with pytest.raises(ConfigError, match=r"t\.over needs t\.late, which is off"):
        Engine(TABLE, Switches("a3", "cpu", **off))


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
