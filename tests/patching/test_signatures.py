"""Whether a provider accepts what its target accepts, from text."""

import ast
from dataclasses import replace

import pytest

from tests.patching.world import CLASS
from verl_patches.patching import signatures
from verl_patches.patching.spec import PatchSpec


def of(text):
    return signatures.of_function(ast.parse(f"def f({text}): pass").body[0])


@pytest.mark.parametrize(
    ("target", "provider", "fault"),
    [
        ("a, b", "a", "too many positional"),
        ("a, b=1", "a, b", "missing"),
        ("a, b", "a, c", "missing"),
        ("a, b", "a, c=1", "unexpected keyword"),
        ("a, b", "b, a", "by place, but b, a by name"),
        ("a, b", "a, *rest, b=1", "by place, but a, b by name"),
        ("a, *, k", "a", "unexpected keyword"),
        ("a, *, k=1", "a, *, k", "missing"),
        ("a, *rest", "a", "too many positional"),
        ("a, **more", "a", "unexpected keyword"),
        ("a", "a, /", "'a'"),
        ("a, /, b, *, c, d=2", "a, /, b, *, c, d=2", None),
        ("a, *rest, c=1, **more", "*a, **k", None),
        ("a, b", "a, b, c=1", None),
        ("a, b=1", "a, *args, **kwargs", None),
        ("a, /", "other", None),
        ("*, k", "**kwargs", None),
    ],
)
def test_a_call_that_would_fail_is_reported_and_a_provider_may_take_more(target, provider, fault):
    faults = signatures.refused_calls(of(target), of(provider))
    assert faults == [] if fault is None else any(fault in found for found in faults)


def test_self_may_have_any_name():
    assert signatures.refused_calls(of("self, x"), of("trainer, x"), bound=True) == []
    assert signatures.refused_calls(of("self, x"), of("trainer, x"), bound=False) != []


UPSTREAM = """
import contextlib
class Shape:
    def __init__(self, a, b=1): pass
class Heir(Shape): pass
class Held:
    @staticmethod
    def s(x): pass
    @classmethod
    def c(cls, x): pass
    @property
    def p(self): pass
    @p.setter
    def p(self, value): pass
def f(x, y=1): pass
made = print
"""
OURS = """
import functools
def wrap_good(original):
    @functools.wraps(original)
    def inner(x, *args, **kwargs):
        def unrelated(): return 1
        return original(x, *args, **kwargs)
    return inner
def wrap_bad(original):
    def inner(x): return 1
    if original is None:
        return original
    return inner
def wrap_called(original):
    return helper("name", original)
def helper(name, original):
    def inner(x, y=1): return original(x, y)
    return inner
def wrap_unseen(original):
    return functools.partial(original, 1)
def wrap_without_argument(): return None
def wrap_forgets(original):
    def inner(x, y=1): return 1
def wrap_gives_back(original):
    return original
def wrap_calls_one_that_forgets(original):
    return wrap_forgets(original)
def rest_too(x, *args, **kwargs): pass
def plain(x): pass
def plain_y(x, y=2): pass
def fget(self): pass
def of_class(cls, x): pass
def entries(): return {}
class Good:
    def __init__(self, a, b=2, c=3): pass
class Bad:
    def __new__(cls, a): pass
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    (tmp_path / "sig_upstream.py").write_text(UPSTREAM)
    (tmp_path / "sig_ours.py").write_text(OURS)
    monkeypatch.syspath_prepend(tmp_path)

    def of_row(kind, target, provider):
        spec = PatchSpec("a.b", f"sig_upstream:{target}", kind, f"sig_ours:{provider}", "why", "exit")
        return signatures.signature_faults(spec, tmp_path)

    return of_row


NO_SIGNATURE = "no signature: "


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("wrap f wrap_good", None),
        ("wrap f wrap_called", None),
        ("replace f plain_y", None),
        ("replace Shape Good", None),
        ("replace Held.s plain", None),
        ("replace Held.s rest_too", None),
        ("replace Held.c of_class", None),
        ("replace Held.p fget", None),
        ("register made entries", None),
        ("stub Held.__reduce_ex__ plain_y", None),
        ("wrap contextlib wrap_unseen", None),
        ("wrap f wrap_bad", "too many positional"),
        ("replace f plain", "too many positional"),
        ("replace Shape Bad", "too many positional"),
        ("replace Held.s fget", "'self'"),
        ("wrap contextlib wrap_without_argument", "provider(original)"),
        ("register made plain", "'x'"),
        ("wrap f wrap_forgets", "no replacement"),
        ("wrap f wrap_gives_back", "no replacement"),
        ("wrap f wrap_calls_one_that_forgets", "no replacement"),
        ("wrap f wrap_unseen", f"{NO_SIGNATURE}wrap_unseen returns functools.partial"),
        ("replace made plain_y", f"{NO_SIGNATURE}sig_upstream:made is assigned"),
        ("replace Heir Good", f"{NO_SIGNATURE}sig_upstream:Heir is"),
        ("replace gone plain", f"{NO_SIGNATURE}sig_upstream:gone has no Python text"),
        ("replace f absent", f"{NO_SIGNATURE}sig_ours:absent has no Python text"),
    ],
)
def test_providers_of_every_kind(faults, row, fault):
    """Accepted, reported, or with the reason why its signature is not known."""
    try:
        found = faults(*row.split())
    except signatures.UnknownSignature as reason:
        found = [f"{NO_SIGNATURE}{reason}"]
    assert found == [] if fault is None else any(fault in text for text in found), found


@pytest.mark.parametrize(("name", "count"), [("OurThing", 0), ("Narrow", 1)])
def test_those_of_a_subclass_are_compared_method_by_method(tree, monkeypatch, name, count):
    monkeypatch.syspath_prepend(tree)
    found = signatures.signature_faults(replace(CLASS, provider=f"ours:{name}"), tree)
    assert len(found) == count and all(fault.startswith("m ") for fault in found), found


def test_a_source_with_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "marked.py").write_bytes(b"\xef\xbb\xbfimport json\n")
    assert [signatures.names_a_module(f"marked:{name}", tmp_path) for name in ("json", "ast")] == [True, False]
