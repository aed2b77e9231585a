"""Test that a replacement must accept its target's arguments, by the objects themselves and when it is applied."""

import functools

import pytest

from verl_patches.patching.signatures import refused_calls


def made(parameters, module="up.base"):
    """Return a function of a module with these parameters."""
    names = {"__name__": module}
    exec(f"def f({parameters}): pass", names)
    return names["f"]


@pytest.mark.parametrize(
    ("target", "replacement", "fault"),
    [
        ("a, b", "a", "too many positional"),
        ("a, b=1", "a, b", "missing"),
        ("a, b", "a, c=1", "unexpected keyword"),
        ("a, b", "b, a", "in the order b, a; expected the target's order a, b"),
        ("a, *, k=1", "a, *, k", "missing"),
        ("a, *rest", "a", "too many positional"),
        ("a: absent", "a, /", "'a'"),
        ("a, /, b, *, c, d=2", "a, /, b, *, c, d=2", None),
        ("a, *rest, c=1, **more", "*a, **k", None),
        ("a, b: absent = 1", "a, *args, **kwargs", None),
        ("*args, **kwargs", "a", None),  # a decorator of upstream
    ],
)
def test_a_call_that_would_fail_is_reported_and_a_replacement_may_take_more(target, replacement, fault):
    if "absent" in target:  # annotations are not evaluated
        target = target.replace("absent", "'no_such_name.x'")
    faults = refused_calls(made(target), made(replacement), "up")
    assert faults == [] if fault is None else any(fault in found for found in faults)


def test_self_may_have_any_name():
    assert refused_calls(made("self, x"), made("trainer, x"), "up", bound=True) == []
    assert refused_calls(made("self, x"), made("trainer, x"), "up") != []


def test_a_wrapper_is_seen_as_it_is_and_upstreams_own_under_that_of_another_library():
    own, narrow = made("a, b"), functools.wraps(made("a, b"))(made("a"))
    assert refused_calls(own, narrow, "up") != []
    theirs = functools.wraps(own)(made("*args, **kwargs", "other"))
    assert refused_calls(theirs, own, "up") == []
    assert refused_calls(made("a, b", "other"), made("a"), "up") == []  # not upstream's: another library put it there
    assert refused_calls(print, made("a"), "builtins") != [] and refused_calls(7, made("a"), "up") == []


@pytest.mark.parametrize(
    ("target", "kind", "provider", "fault"),
    [
        ("up.base:f", "wrap", "ours:narrow", "refuses a call that the target accepts: missing"),
        ("up.base:Thing", "subclass", "ours:Narrow", "m refuses a call that the target accepts: missing"),
        ("up.base:Thing", "subclass", "ours:OurThing", ""),
        ("up.base:Thing.cl", "wrap", "ours:louder", ""),
    ],
)
def test_a_row_whose_provider_does_not_fit_is_unsupported(play, target, kind, provider, fault):
    out = play(f"""
        e = engine(row("t.f", {target!r}, {kind!r}, {provider!r})); e.apply()
        out = [catch_error(lambda: __import__("up.base")), states(e)["t.f"]]
    """)
    assert out[1] == ("unsupported" if fault else "active")
    assert (out[0] is None) if not fault else f"{provider} does not fit its target: " in out[0] and fault in out[0]
