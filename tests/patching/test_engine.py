"""Test the patch engine on a small upstream package, each order of events in a fresh interpreter."""

import pytest


@pytest.mark.parametrize("rows", ["F, OVER", "OVER, F"])
def test_a_row_goes_over_the_row_that_it_needs_whichever_hook_runs_first(play, rows):
    """Check this because the upper patch's hook can run first if an import ends while apply() adds hooks."""
    out = play(f"""
        from verl_patches.patching import hooks
        take = hooks._take_hooks
        hooks._take_hooks = lambda name: take(name)[::-1]
        e = engine({rows})
        e.apply()
        import up.user
        out = [verify_error(e), up.user.f(1)]
        e.revert(); out += [up.base.f(1), up.user.f(1)]
        e.apply(); out += [verify_error(e), up.base.f(1)]
    """)
    assert out == [None, "1!?", 1, 1, None, "1!?"]


@pytest.mark.parametrize(("provider", "inner"), [("standin_mod", "inner.deep"), ("standin_mod:object_", "deep")])
def test_modules_inside_a_stub_can_be_imported_and_others_cannot(play, provider, inner):
    out = play(f"""
        import importlib
        e = engine(row("t.stub", "no_such", "stub", "{provider}")); e.apply()
        out = [importlib.import_module("no_such.{inner}").answer, verify_error(e)]
        for other in ("no_such.answer", "no_such.other", "no_such.{inner}.answer"):
            out.append(catch_error(lambda: importlib.import_module(other)).partition(":")[0])
        e.revert()
        out.append([name for name in sys.modules if name.startswith("no_such")])
        engine(row("t.stub", "no_such", "stub", "standin_mod:answer")).apply()
        try: import no_such
        except RuntimeError as error: out.append(str(error))
    """)
    assert out[:-1] == [43, None, *["ModuleNotFoundError"] * 3, []] and "expected a module there" in out[-1]


def test_a_value_of_none_is_replaced_and_put_back(play):
    """Check a value of None; orders_world.py has other kinds of target."""
    out = play("""
        e = engine(row("t.value", "up.base:NOTHING", "replace", "ours:VALUE")); e.apply()
        import up.base, ours
        out = [up.base.NOTHING is ours.VALUE, verify_error(e)]
        e.revert(); out.append(up.base.NOTHING)
    """)
    assert out == [True, None, None]


def test_a_row_may_wait_in_other_processes_than_its_own_and_where_its_package_is_unused(play):
    out = play("""
        e = engine(row("t.f", processes=frozenset({"worker"}))); e.apply()
        packages = "up", "up.base", "up.b", "base"
        out = [catch_error(lambda: e.verify("controller"))]
        out += [catch_error(lambda name=name: e.verify("worker", (name,))) for name in packages]
    """)
    assert out[:3] == [None] * 3 and all("t.f is waiting" in error for error in out[3:])


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
        out += [verify_error(e), list(states(e).values())]
        e.revert()
        out += [up.base.Thing is upstream, up.base.Thing().m()]
    """)
    assert out == ["m and ours", "up.base", "Thing", True, None, ["active"] * 2, True, "m"]


def test_a_feature_is_switched_off_by_itself_and_the_class_only_with_it(play):
    out = play("""
        e = engine(CLASS, FEATURE, text="-t.feature"); e.apply()
        import up.base
        out = [up.base.Thing().m(), states(e)["t.feature"], verify_error(e)]
        out.append(catch_error(lambda: engine(CLASS, FEATURE, text="-t.class")))
    """)
    assert out[:3] == ["m", "off", None] and "t.feature needs t.class" in out[3]


def test_an_override_of_another_method_is_failed_and_one_without_its_class_in_place_is_unsupported(play):
    out = play("""
        def imported(*rows):
            e = engine(*rows); e.apply()
            error = catch_error(lambda: __import__("up.base"))
            e.revert()
            return error
        wrong = row("t.wrong", "up.base:Thing.m", "override", "ours:NotOver.m", needs=("t.class",))
        out = [imported(CLASS, wrong)]
        elsewhere = row("t.class", "up.other:Thing", "subclass", "ours:OurThing")
        out.append(imported(elsewhere, FEATURE))
        e = engine(elsewhere, FEATURE, text="drift=warn"); e.apply()
        import up.base
        out.append(row_states(e)["t.feature"])
    """)
    assert "row t.wrong" in out[0] and "OurThing.m" in out[0]
    assert "row t.feature" in out[1] and "it needs row t.class, which is waiting" in out[1]
    assert out[2] == ["unsupported", "it needs row t.class, which is waiting and was not applied"]


def test_an_import_error_of_a_hook_stops_every_import(play):
    """Check that the import raises another error, because upstream swallows an ImportError."""
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
