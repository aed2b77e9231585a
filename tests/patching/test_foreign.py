"""Test another library that patches the same places before, over and around us, and two of our patches on one place."""

import pytest


@pytest.mark.parametrize(
    ("how", "words", "seen"),
    [("replacing", "replaces ours", ["theirs", "theirs"]), ("wrapping", "wraps ours", ["<1!?>", "<1!?>"])],
)
def test_a_library_that_patches_after_us_is_reported_and_refused(play, how, words, seen):
    out = play(f"""
        import up.user, theirs
        e = engine(F, OVER); e.apply()
        fine = verify_error(e)
        theirs.put("up.base", "f", theirs.{how})
        out = [fine, states(e)["t.over"], row_states(e)["t.f"], verify_error(e), [up.base.f(1), up.user.f(1)]]
        e.revert()
        out += [row_states(e)["t.over"], [up.base.f(1), up.user.f(1)]]
    """)
    fine, upper, (state, reason), refusal, found, (after, why), left = out
    assert fine is None and upper == state == "overridden" and found == seen == left
    assert words in reason and reason.startswith("up.base:f is now ") and "theirs." in reason and "theirs.py:" in reason
    assert "t.f is overridden" in refusal and reason in refusal and "Import it before the prelude" in refusal
    assert after == "reverted" and "was left there" in why


def test_a_library_that_patched_before_us_is_wrapped(play):
    out = play("""
        import up.user, theirs
        theirs.put("up.base", "f", theirs.wrapping)
        e = engine(F); e.apply()
        out = [verify_error(e), up.base.f(1), up.user.f(1)]
        e.revert()
        out += [up.base.f(1), up.user.f(1)]
    """)
    assert out == [None, "<1>!", "<1>!", "<1>", "<1>"]


def test_an_entry_that_was_changed_is_named(play):
    out = play("""
        import up.base
        e = engine(row("t.table", "up.base:TABLE", "register", "ours:entries")); e.apply()
        up.base.TABLE["b"] = len
        out = [row_states(e)["t.table"]]
        e.revert()
        out.append(up.base.TABLE["b"] is len)
    """)
    assert out == [["overridden", "entry 'b' is now builtins.len"], True]


def test_a_module_imported_anew_or_dropped_is_not_called_active(play):
    out = play("""
        import up.base
        e = engine(row("t.m", "up.base:Thing.m")); e.apply()
        first = sys.modules.pop("up.base")
        dropped = row_states(e)["t.m"]
        import up.base
        again = row_states(e)["t.m"]
        sys.modules["up.base"] = first
        out = [dropped, again, row_states(e)["t.m"][0]]
    """)
    assert out[0] == ["overridden", "up.base was removed from sys.modules after it was patched"]
    assert out[1][0] == "overridden" and "replaces ours" in out[1][1] and out[2] == "active"


@pytest.mark.parametrize(
    ("put", "under", "found"),
    [
        ("theirs.wrapping(up.base.f)", ("theirs",), ["active", "<1!>"]),
        ("theirs.wrapping(up.base.f)", (), ["overridden", "<1!>"]),
        ("theirs.wrapping(theirs.other)", ("theirs",), ["overridden", "<1>"]),
    ],
)
def test_a_named_library_may_wrap_a_row_but_not_replace_it(play, put, under, found):
    out = play(f"""
        import up.base, theirs
        e = engine(row("t.f", under={under})); e.apply()
        up.base.f = {put}
        out = [states(e)["t.f"], up.base.f(1)]
    """)
    assert out == found
