import textwrap

import pytest

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
    def of(text, place):
        (tmp_path / "mod.py").write_text(textwrap.dedent(text))
        fp._tree.cache_clear()
        return fp.fingerprint(f"mod:{place}", tmp_path)
    return of


@pytest.mark.parametrize("place", ["f", "C", "C.m", "TABLE", "late"])
def test_comments_docstrings_and_layout_do_not_count(printed, place):
    before = printed(BODY, place)
    assert before != fp.NO_SOURCE
    changed = BODY.replace('"""doc"""', '"""other words"""').replace("return x + 1", "# note\n    return (x + 1)")
    assert printed(changed.replace('"doc"', '"another"'), place) == before


@pytest.mark.parametrize(("place", "old", "new"), [
    ("f", "x + 1", "x + 2"), ("f", "f(x)", "f(x, y=0)"), ("C.m", ">10", ">11"), ("C", "self!r", "self!s"),
    ("TABLE", "1}", "2}"), ("late", "return 1", "return 2")])
def test_any_token_of_the_body_counts(printed, place, old, new):
    assert printed(BODY, place) != printed(BODY.replace(old, new), place)


def test_absent_names_and_modules_have_no_source(printed):
    assert printed(BODY, "g") == fp.NO_SOURCE and fp.fingerprint("no_such_module_here:f") == fp.NO_SOURCE


def test_reading_imports_nothing():
    import subprocess
    import sys

    code = ("import sys; from verl_patches.patching.fingerprint import fingerprint as f\n"
            "assert f('json.decoder:JSONDecoder.decode') != 'no-python-source'\nassert 'json.decoder' in sys.modules\n"
            "assert f('email.mime.text:MIMEText') != 'no-python-source'\nassert 'email' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
