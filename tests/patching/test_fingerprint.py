"""Test which changes alter a fingerprint, and its record."""

import textwrap

import pytest

from tests.patching.world import forget_files
from verl_patches.patching import fingerprint as fp

BODY = '''
import os
TABLE = {"a": 1}
def f(x):
    """doc"""
    return x + 1
class C:
    "doc"
    def m(self):
        return f"{self!r:>10}"
if os:
    def late(): return 1
'''


@pytest.fixture
def printed(tmp_path):
    def print_fingerprint(text, place):
        (tmp_path / "mod.py").write_text(textwrap.dedent(text))
        forget_files()
        return fp.fingerprint(f"mod:{place}", tmp_path)

    return print_fingerprint


# -- what counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["f", "C", "C.m", "TABLE", "late"])
def test_comments_docstrings_and_layout_do_not_count(printed, place):
    before = printed(BODY, place)
    assert before != fp.NO_SOURCE
    changed = BODY.replace('"""doc"""', '"""other words"""').replace("return x + 1", "# note\n    return (x + 1)")
    assert printed(changed.replace('"doc"', '"another"'), place) == before


@pytest.mark.parametrize(
    ("before", "after"),
    [("x + 1", "x - 1"), ("b=12", "*, b=12"), ("{x!r:>10}", "{x!s:>10}"), ("        g(x", "    g(x")],
)
def test_one_token_and_the_place_of_a_statement_count(printed, before, after):
    text = "def f(x, b=12):\n    if x and b:\n        h()\n        g(x.size, 'word', f'{x!r:>10}')\n    return x + 1\n"
    assert text.count(before) == 1 and printed(text, "f") != printed(text.replace(before, after), "f")


OUTER = """
@keep
class B(Base, metaclass=Meta):
    class C(B1):
        def m(self): return 1
        def n(self): return 1
"""


@pytest.mark.parametrize(
    ("before", "after"), [("@keep", "@other"), ("Base", "Mine"), ("metaclass=Meta", "metaclass=Mine"), ("(B1)", "()")]
)
def test_the_headers_of_the_classes_around_a_method_count(printed, before, after):
    assert printed(OUTER, "B.C.m") != printed(OUTER.replace(before, after), "B.C.m") != fp.NO_SOURCE


def test_the_bodies_of_the_classes_around_a_method_do_not_count(printed):
    changed = OUTER.replace("def n(self): return 1", "def n(self): return 2\n    x = 1")
    assert printed(OUTER, "B.C.m") == printed(changed, "B.C.m") and printed(OUTER, "B.C") != printed(changed, "B.C")


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("for i in ():\n    def f(): return 1\n", "for i in ():\n    def f(): return 2\n"),
        ("(f, [g, *h]) = 1, 2, 3\n", "(f, [g, *h]) = 2, 2, 3\n"),
        ("f = 1\nf += 2\n", "f = 1\nf += 3\n"),
    ],
)
def test_every_statement_that_binds_the_name_counts(printed, text, changed):
    assert printed(text, "f") != fp.NO_SOURCE
    assert printed(text, "f") != printed(changed, "f")
    assert printed(f"{text}f.x = f[0] = 3\ndef g(): f = 4\n", "f") == printed(text, "f")


# -- where it looks ----------------------------------------------------------------------------------------------------


def test_a_name_imported_from_the_same_package_is_followed(tmp_path, printed):
    assert printed(BODY, "g") == fp.NO_SOURCE and fp.fingerprint("no_such_module_here:f") == fp.NO_SOURCE
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "deep.py").write_text("def f(): return 1\nclass K:\n    def m(self): return 2\n")
    (tmp_path / "pack" / "loop.py").write_text("from .loop import f\n")
    (tmp_path / "pack" / "__init__.py").write_text(
        "from .deep import f as g\nfrom os import path\nclass C:\n    from .deep import f as h\nfrom .deep import K\n"
    )
    assert fp.fingerprint("pack:g", tmp_path) == fp.fingerprint("pack.deep:f", tmp_path) != fp.NO_SOURCE
    assert fp.definitions("pack:g", tmp_path)[0].file.name == "deep.py"
    assert fp.definitions("pack:C.h", tmp_path) == fp.definitions("pack.deep:f", tmp_path)  # in a class body
    assert fp.definitions("pack:K.m", tmp_path) == fp.definitions("pack.deep:K.m", tmp_path) != []
    assert fp.fingerprint("pack:path", tmp_path) == fp.fingerprint("pack.loop:f", tmp_path) == fp.NO_SOURCE


# -- the record --------------------------------------------------------------------------------------------------------


def test_the_record_keeps_other_lines_and_has_one_target_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(fp, "REVIEWED_FILE", tmp_path / "fingerprints.json")
    (tmp_path / "mod.py").write_text("def f(): return 1\n")
    found = fp.fingerprint("mod:f", tmp_path)
    entry = {"hash": found, "files": {}}
    fp.write_reviewed("pypi", {"mod:f": entry, "mod:absent": {"hash": fp.NO_SOURCE}})
    fp.write_reviewed("a3", {"mod:f": entry})
    fp.write_reviewed("pypi", {"mod:g": entry})
    assert fp.reviewed_hash("pypi", "mod:f") == found and fp.reviewed_hash("a3", "mod:g") is None
    assert set(fp.reviewed_entries("pypi")) == {"mod:f", "mod:g", "mod:absent"}
    assert sum("mod:" in line for line in fp.REVIEWED_FILE.read_text().splitlines()) == 4
    assert fp.write_reviewed("pypi", {"mod:f": entry}, whole=True) == ["mod:absent", "mod:g"]
    assert set(fp.reviewed_entries("pypi")) == {"mod:f"} == set(fp.reviewed_entries("a3"))


def test_a_file_of_the_reviewed_bytes_is_not_parsed_and_any_other_is(tmp_path, monkeypatch):
    """Check also a file from which a name is imported: its bytes count, not only those of the patch's module."""
    monkeypatch.setattr(fp, "REVIEWED_FILE", tmp_path / "fingerprints.json")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from .deep import f\n")
    deep, target = tmp_path / "pack" / "deep.py", "pack:f"
    deep.write_text("def f(): return 1\n")
    assert set(fp.file_hashes(target)) == {"pack", "pack.deep"}
    known = fp.fingerprint(target)
    fp.write_reviewed("pypi", {target: {"hash": known, "files": fp.file_hashes(target)}})
    monkeypatch.setattr(fp, "fingerprint", lambda target: "parsed")
    assert fp.current_hash("pypi", target) == known
    assert fp.current_hash("a3", target) == fp.current_hash("pypi", "pack:g") == "parsed"  # nothing was recorded
    deep.write_text("def f(): return 2\n")
    forget_files()
    assert fp.current_hash("pypi", target) == "parsed"
    deep.unlink()
    assert fp.current_hash("pypi", target) == "parsed"
