"""Test drift=strict and drift=warn where upstream differs from the reviewed code, and providers that fail."""

import pytest


@pytest.fixture
def imported(play):
    """Import up.base twice under a patch on `target` and one on up.base:g; return the values of CODE's `out`."""
    return lambda policy, target="up.base:f", kind="wrap", drifted=(): play(f"""
        drift(*{drifted})
        e = engine(row("t.f", {target!r}, {kind!r}), row("t.g", "up.base:g"), text="drift={policy}"); e.apply()
        first, second = catch_error(lambda: __import__("up.base")), catch_error(lambda: __import__("up.base"))
        seen = [sys.modules["up.base"].f(1), sys.modules["up.base"].g(1)] if "up.base" in sys.modules else None
        out = dict(first=first, second=second, states=states(e), reason=row_states(e)["t.f"][1], warnings=warned,
                   proof=verify_error(e), seen=seen)
    """)


DRIFTED = ("up.base:f",)


def test_strict_stops_at_a_drifted_body_and_leaves_nothing_imported(imported):
    out = imported("strict", drifted=DRIFTED)
    assert out["first"].startswith("PatchError: row t.f: up.base:f has drifted") and out["second"] == out["first"]
    assert [
        word for word in ("version of up (", "--write", "drift=warn", "-t.f", "base.py") if word not in out["first"]
    ] == []
    assert out["seen"] is None and out["states"] == {"t.f": "drifted", "t.g": "waiting"}
    assert "t.f is drifted" in out["proof"]


@pytest.mark.parametrize("policy", ["strict", "warn"])
def test_a_row_that_was_never_reviewed_is_drifted(play, policy):
    out = play(f"""
        drift("up.base:f", reviewed=None)
        e = engine(row("t.f"), text="drift={policy}"); e.apply()
        out = [catch_error(lambda: __import__("up.base")), row_states(e)["t.f"]]
    """)
    assert out[1][0] == "drifted" and "never reviewed: expected a record, found" in out[1][1]
    assert (out[0] is None) == (policy == "warn")


@pytest.mark.parametrize(
    ("target", "state", "seen", "words"),
    [
        ("up.base:f", "drifted", ["1!", "1!"], "drift=warn"),
        ("up.base:gone", "unsupported", [1, "1!"], "does not exist"),
    ],
)
def test_warn_applies_a_row_where_it_can_or_leaves_it_alone_with_a_warning(imported, target, state, seen, words):
    out = imported("warn", target, drifted=DRIFTED)
    assert out["first"] is None and out["proof"] is None and out["seen"] == seen
    assert out["states"] == {"t.f": state, "t.g": "active"}
    assert state == "unsupported" or "expected 0000000000000000" in out["reason"]
    (warning,) = out["warnings"]
    assert f"t.f is {state}" in warning and words in warning


@pytest.mark.parametrize(
    ("target", "kind", "words"),
    [
        ("up.base:gone", "wrap", "up.base:gone does not exist"),
        ("up.base:Thing", "extend", "up.base:Thing exists already"),
        ("up.base:Gone.m", "wrap", "has no 'Gone'"),
        ("up.base:CONSTANT", "register", "takes no entries"),
    ],
)
def test_a_place_that_upstream_lacks_is_unsupported(imported, target, kind, words):
    out = imported("strict", target, kind)
    assert words in out["first"] and out["second"] == out["first"] and out["states"]["t.f"] == "unsupported"
    assert out["seen"] is None


@pytest.mark.parametrize(
    ("provider", "words"),
    [
        ("ours:bad", "ImportError: no such thing"),
        ("ours:nothing", "must return a callable"),
        ("ours:same", "returned the original"),
        ("ours:exits", "SystemExit"),
    ],
)
def test_a_provider_that_fails_always_stops(play, provider, words):
    out = play(f"""
        e = engine(row("t.f", provider={provider!r}), text="drift=warn")
        e.apply()
        out = [catch_error(lambda: __import__("up.base")), catch_error(lambda: __import__("up.base"))]
        out += [states(e)["t.f"], verify_error(e), "up.base" in sys.modules]
    """)
    first, second, state, refusal, is_imported = out
    assert words in first and second == first and not is_imported
    assert state == ("waiting" if words == "SystemExit" else "failed") and f"t.f is {state}" in refusal
    assert words == "SystemExit" or first.startswith("PatchError: row t.f:")


@pytest.mark.parametrize("order", ["import up.other, up.base", "import up.base, up.other"])
def test_rows_that_need_one_that_was_left_out_are_left_out_in_any_order_of_imports(play, order):
    out = play(f"""
        rows = [row("t.low", "up.base:gone"), row("t.mid", "up.other:h", needs=("t.low",)),
                row("t.over", "up.other:h", needs=("t.mid",)), row("t.top", "up.base:g", needs=("t.over",)),
                row("t.else", "up.base:Thing.m")]
        e = engine(*rows, text="drift=warn")
        e.apply(); e.apply()
        {order}
        def seen(): return [up.base.f(1), up.other.h(1), up.base.g(1), up.base.Thing().m()]
        out = [states(e), row_states(e)["t.top"][1], seen(), verify_error(e)]
        e.apply(); e.revert()
        out += [seen(), states(e)]
    """)
    states = {**dict.fromkeys(("t.low", "t.mid", "t.over", "t.top"), "unsupported"), "t.else": "active"}
    assert out[:2] == [states, "it needs row t.over, which is unsupported and was not applied"]
    assert out[2:4] == [[1, 1, 1, "m!"], None]
    assert out[4] == [1, 1, 1, "m"] and set(out[5].values()) == {"reverted"}


def test_rows_that_wait_for_another_module_stay_waiting_where_one_was_left_out(play):
    out = play("""
        methods = row("t.class", "up.other:Thing", "subclass", "ours:OurThing")
        feature = row("t.feature", "up.other:Thing.m", "override", "ours:OurThing.m", needs=("t.class",))
        e = engine(row("t.f", "up.base:gone"), methods, feature, text="drift=warn")
        e.apply()
        import up.base
        out = [states(e)]
    """)
    assert out == [{"t.f": "unsupported", "t.class": "waiting", "t.feature": "waiting"}]
