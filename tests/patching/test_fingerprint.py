"""What changes a fingerprint and what does not, and that every Python computes the same one."""

import ast
import functools
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from verl_patches.patching import fingerprint as fp
from verl_patches.patching.contract import _changes
from verl_patches.patching.fingerprint import flatten, whole_hash

CORPUS = Path(__file__).resolve().parent / "corpus"

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
    def of(text, place):
        (tmp_path / "mod.py").write_text(textwrap.dedent(text))
        fp._tree.cache_clear()
        fp._nodes.cache_clear()
        return fp.fingerprint(f"mod:{place}", tmp_path)

    return of


# -- what counts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["f", "C", "C.m", "TABLE", "late"])
def test_comments_docstrings_and_layout_do_not_count(printed, place):
    before = printed(BODY, place)
    assert before != fp.NO_SOURCE
    changed = BODY.replace('"""doc"""', '"""other words"""').replace("return x + 1", "# note\n    return (x + 1)")
    assert printed(changed.replace('"doc"', '"another"'), place) == before


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("if x:\n  a()\n  b()", "if x:\n  a()\n b()"),
        ("for y in x:\n  a()\n else:\n  b()", "for y in x:\n  a()\n b()"),
        ("try:\n  a()\n  b()\n finally:\n  c()", "try:\n  a()\n finally:\n  b()\n  c()"),
        ("a()\n b()", "b()\n a()"),
    ],
)
def test_the_place_of_a_statement_counts(printed, before, after):
    assert printed(f"def f(x):\n {before}", "f") != printed(f"def f(x):\n {after}", "f")


OUTER = """
@keep
class B(Base, metaclass=Meta):
    class C(B1):
        def m(self): return 1
        def n(self): return 1
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("@keep", "@other"),
        ("@keep\n", ""),
        ("Base", "Mine"),
        ("metaclass=Meta", "metaclass=Mine"),
        ("Meta", "Meta, slots=1"),
        ("(B1)", "(B1, B2)"),
        ("    class C", "    @more\n    class C"),
    ],
)
def test_the_headers_of_the_classes_around_a_method_count(printed, before, after):
    assert printed(OUTER, "B.C.m") != printed(OUTER.replace(before, after), "B.C.m") != fp.NO_SOURCE


def test_the_bodies_of_the_classes_around_a_method_do_not_count(printed):
    changed = OUTER.replace("def n(self): return 1", "def n(self): return 2\n    x = 1")
    assert printed(OUTER, "B.C.m") == printed(changed, "B.C.m") and printed(OUTER, "B.C") != printed(changed, "B.C")


CHANGES = [
    ("x + 1", "x - 1"),
    ("x + 1", "x + 2"),
    ("x + 1", "y + 1"),
    ("return x", "yield x"),
    ("'word'", "'ward'"),
    ("{x!r:>10}", "{x!s:>10}"),
    ("b=12", "b=13"),
    ("b=12", "*, b=12"),
    ("x.size", "x.sizes"),
    ("if x and b", "if x or b"),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_names_numbers_strings_and_operators_count_and_the_statement_is_reported(before, after):
    text = "def f(x, b=12):\n    if x and b:\n        g(x.size, 'word', f'{x!r:>10}')\n    return x + 1\n"
    first, second = (flatten(ast.parse(each).body[0], CORPUS) for each in (text, text.replace(before, after)))
    assert whole_hash(first) != whole_hash(second)
    (reported,) = _changes([s.hash for s in first], second)[0]
    assert after in "".join(text.replace(before, after).splitlines()[reported.line - 1 : reported.end_line])


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("for i in ():\n    def f(): return 1\n", "for i in ():\n    def f(): return 2\n"),
        ("match 1:\n    case 1:\n        f = 1\n", "match 1:\n    case 1:\n        f = 2\n"),
        ("try:\n    pass\nfinally:\n    f = 1\n", "try:\n    pass\nfinally:\n    f = 2\n"),
        ("(f, [g, *h]) = 1, 2, 3\n", "(f, [g, *h]) = 2, 2, 3\n"),
        ("f = 1\nf += 2\n", "f = 1\nf += 3\n"),
        ("f: int = 1\n", "f: int = 2\n"),
    ],
)
def test_every_statement_that_binds_the_name_counts(printed, text, changed):
    assert printed(text, "f") != fp.NO_SOURCE
    assert printed(text, "f") != printed(changed, "f")
    assert printed(f"{text}f.x = f[0] = 3\ndef g(): f = 4\n", "f") == printed(text, "f")


def test_a_form_feed_ends_no_line(printed, tmp_path):
    printed("x = 'a\x0c\x85\u2028'\n\x0c\ndef f():\n    return 1\n", "f")
    assert [s.source() for s in fp.statements("mod:f", tmp_path)] == [["def f():"], ["    return 1"]]


# -- where it looks ----------------------------------------------------------------------------------------------------


def test_a_name_imported_from_the_same_package_is_followed(tmp_path, printed):
    assert printed(BODY, "g") == fp.NO_SOURCE and fp.fingerprint("no_such_module_here:f") == fp.NO_SOURCE
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "deep.py").write_text("def f(): return 1\n")
    (tmp_path / "pack" / "loop.py").write_text("from .loop import f\n")
    (tmp_path / "pack" / "__init__.py").write_text("from .deep import f as g\nfrom os import path\n")
    assert fp.fingerprint("pack:g", tmp_path) == fp.fingerprint("pack.deep:f", tmp_path) != fp.NO_SOURCE
    assert fp.statements("pack:g", tmp_path)[0].file.name == "deep.py"
    assert fp.fingerprint("pack:path", tmp_path) == fp.fingerprint("pack.loop:f", tmp_path) == fp.NO_SOURCE


# -- the record --------------------------------------------------------------------------------------------------------


def test_the_record_keeps_other_lines_and_has_one_target_a_line(tmp_path, monkeypatch):
    monkeypatch.setattr(fp, "REVIEWED", tmp_path / "fingerprints.json")
    (tmp_path / "mod.py").write_text("def f(): return 1\n")
    found = fp.statements("mod:f", tmp_path)
    fp.write_reviewed("pypi", {"mod:f": found, "mod:absent": []})
    fp.write_reviewed("a3", {"mod:f": found})
    fp.write_reviewed("pypi", {"mod:g": found})
    assert fp.reviewed_hash("pypi", "mod:f") == fp.fingerprint("mod:f", tmp_path)
    assert fp.reviewed("a3")["mod:f"]["statements"] == [s.hash for s in found]
    assert fp.reviewed_hash("pypi", "mod:absent") == fp.NO_SOURCE and fp.reviewed_hash("a3", "mod:g") is None
    assert set(fp.reviewed("pypi")) == {"mod:f", "mod:g", "mod:absent"}
    assert fp.write_reviewed("pypi", {"mod:f": found}, whole=True) == ["mod:absent", "mod:g"]
    assert set(fp.reviewed("pypi")) == {"mod:f"} == set(fp.reviewed("a3"))
    assert fp.write_reviewed("pypi", {"mod:g": found, "mod:absent": []}) == []
    text = fp.REVIEWED.read_text()
    assert sum("mod:" in line for line in text.splitlines()) == 4 and "return" not in text


def test_a_file_of_the_reviewed_bytes_is_not_parsed_and_any_other_is(tmp_path, monkeypatch):
    """Also one that a name is imported from: its bytes count, not those of the module alone that the row names."""
    monkeypatch.setattr(fp, "REVIEWED", tmp_path / "fingerprints.json")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").write_text("from .deep import f\n")
    deep, target = tmp_path / "pack" / "deep.py", "pack:f"
    deep.write_text("def f(): return 1\n")
    assert set(fp.files_read(target)) == {"pack", "pack.deep"}
    fp.write_reviewed("pypi", {target: fp.statements(target)}, files={target: fp.files_read(target)})
    known = fp.fingerprint(target)
    monkeypatch.setattr(fp, "fingerprint", lambda target: "parsed")
    assert fp.current("pypi", target) == known
    assert fp.current("a3", target) == fp.current("pypi", "pack:g") == "parsed"  # nothing was recorded
    deep.write_text("def f(): return 2\n")
    assert fp.current("pypi", target) == "parsed"
    deep.unlink()
    assert fp.current("pypi", target) == "parsed"


# -- the same on every Python ------------------------------------------------------------------------------------------


@functools.cache
def interpreter(version):
    """A Python of that version that really runs, from the search path or from pyenv's folder; None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    places = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"{version}.*/bin/python")))]
    for path in filter(None, places):
        command = [path, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0 and done.stdout.strip() == version:  # a shim may not work
            return path
    return None


@pytest.mark.parametrize("version", ["3.10", "3.11", "this"])
@pytest.mark.parametrize("corpus", sorted(p.stem for p in CORPUS.glob("*.txt")))
def test_hashes_and_lines_are_the_recorded_ones_on_every_python(version, corpus):
    path = sys.executable if version == "this" else interpreter(version)
    if path is None:
        pytest.skip(f"no Python {version} on this machine")
    number = sys.version_info[:2] if version == "this" else tuple(map(int, version.split(".")))
    if number < (3, int(corpus.removeprefix("py3"))):
        pytest.skip(f"{corpus} is syntax that Python {version} does not have")
    command = [path, "-W", "ignore", "-B", str(CORPUS / "hashes.py"), str(CORPUS / f"{corpus}.txt")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (CORPUS / f"{corpus}.golden").read_text()
