"""Rows of kind subclass and override: our class over upstream's, and its features with switches of their own."""

import textwrap

import pytest

from tests.patching.test_engine import UPSTREAM, run
from verl_patches.errors import ConfigError
from verl_patches.patching.signatures import signature_faults
from verl_patches.patching.spec import PatchSpec, validate

OURS = """
from verl_patches.patching.engine import is_on
class OurThing:
    def plain(self):
        return f"{super().plain()} and ours" if is_on("t.feature") else super().plain()
class NotOver:
    def plain(self): return "nobody's"
class Narrow:
    def plain(self, extra): return extra
"""
ROWS = """
from verl_patches.patching import engine as engines
CLASS = row("t.class", "up.base:Thing", "subclass", "our_thing:OurThing")
FEATURE = row("t.feature", "up.base:Thing.plain", "override", "our_thing:OurThing.plain", needs=("t.class",))
def started(*rows, text=""):
    engines._CURRENT = engine(*rows, text=text)
    return engines._CURRENT
"""


@pytest.fixture
def tree(tmp_path, monkeypatch):
    for name, text in {**UPSTREAM, "our_thing.py": OURS}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("first", "then"), [("e.apply()", "import up.base"), ("import up.base", "e.apply()")])
def test_methods_go_over_upstreams_under_its_name_and_come_out_again(tree, first, then):
    run(
        tree,
        f"""{ROWS}
        e = started(CLASS, FEATURE)
        {first}
        {then}
        upstream = up.base.Thing.__mro__[2]
        assert up.base.Thing().plain() == "plain and ours", up.base.Thing().plain()
        assert (up.base.Thing.__module__, up.base.Thing.__qualname__) == ("up.base", "Thing")
        import pickle
        assert pickle.loads(pickle.dumps(up.base.Thing)) is up.base.Thing
        e.verify("worker")
        assert state(e, "t.class") == state(e, "t.feature") == "active"
        e.revert()
        assert up.base.Thing is upstream and up.base.Thing().plain() == "plain"
    """.replace("\n        ", "\n"),
    )


def test_a_feature_is_switched_off_by_itself_and_the_class_only_with_it(tree):
    run(
        tree,
        f"""{ROWS}
        from verl_patches.errors import ConfigError
        e = started(CLASS, FEATURE, text="-t.feature")
        e.apply()
        import up.base
        assert up.base.Thing().plain() == "plain" and state(e, "t.feature") == "off"
        e.verify("worker")
        try:
            engine(CLASS, FEATURE, text="-t.class")
        except ConfigError as error:
            assert "t.feature needs t.class" in str(error)
        else:
            raise AssertionError("accepted")
    """.replace("\n        ", "\n"),
    )


def test_a_method_that_does_not_stand_there_is_refused(tree):
    run(
        tree,
        f"""{ROWS}
        wrong = row("t.wrong", "up.base:Thing.plain", "override", "our_thing:NotOver.plain", needs=("t.class",))
        e = started(CLASS, wrong)
        e.apply()
        try:
            import up.base
        except Exception as error:
            assert "t.wrong" in str(error) and "OurThing.plain" in str(error), error
        else:
            raise AssertionError("active")
    """.replace("\n        ", "\n"),
    )


def spec(id, target, kind, provider, needs=()):
    return PatchSpec(id=id, stage="model", target=target, kind=kind, provider=provider, why="w", exit="e", needs=needs)


def test_an_override_needs_a_subclass_row_and_two_may_share_a_method():
    cls = spec("a.cls", "up.base:Thing", "subclass", "our_thing:OurThing")
    one, other = (
        spec(f"a.{name}", "up.base:Thing.plain", "override", "our_thing:OurThing.plain", ("a.cls",))
        for name in ("one", "other")
    )
    assert set(validate([cls, one, other])) == {"a.cls", "a.one", "a.other"}
    with pytest.raises(ConfigError, match="override must name the subclass row"):
        validate([spec("a.one", "up.base:Thing.plain", "override", "our_thing:OurThing.plain")])


@pytest.mark.parametrize(("name", "faults"), [("OurThing", 0), ("Narrow", 1)])
def test_signatures_of_a_subclass_are_compared_method_by_method(tree, name, faults):
    found = signature_faults(spec("a.cls", "up.base:Thing", "subclass", f"our_thing:{name}"), tree)
    assert len(found) == faults and all(fault.startswith("plain ") for fault in found), found
