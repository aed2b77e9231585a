"""Test the contract check on a small upstream package: each kind of change is reported, an unchanged tree passes."""

import dataclasses

import pytest

from tests.patching.world import forget_files
from verl_patches.errors import ConfigError
from verl_patches.patching import contract
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.spec import PatchSpec

FILES = {
    "up/__init__.py": "from .tools import weigh, Scale\n",
    "up/tools.py": '''"""Tools."""
__all__ = ["weigh", "Scale"]

def weigh(thing, scale=1):
    """Words."""
    if scale:
        total = thing * 2
        total += 1
    return total

def hidden(x): return x

class Scale:
    def read(self, unit="kg"):
        return unit
''',
    "up/user.py": """from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from up.tools import weigh as only_a_type
try:
    from up import weigh as w
except ImportError:
    w = None

class Shop:
    from .tools import (  # a note with a ) in it
        Scale,
        weigh,
    )

def later():
    from up.tools import weigh
    return weigh
""",
    "up/all.py": "from .tools import *\n",
    "up/odd.py": "def broken(:\nfrom up.tools import weigh\n",
}
OURS = """
def wrap(original):
    def weigh(thing, *args, **kwargs): return original(thing, *args, **kwargs)
    return weigh
def read(self, unit="kg"): return "g"
def new(self): return 1
"""
BINDINGS = ("up:weigh", "up.user:w", "up.user:Shop.weigh", "up.all:weigh")


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Make a folder with the package `up`, our providers on the path, and a record of our own."""
    for name, text in FILES.items():
        (tmp_path / "now" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "now" / name).write_text(text)
    (tmp_path / "now/up/latin.py").write_bytes(b"from up.tools import weigh\nx = 'caf\xe9'\n")
    (tmp_path / "contract_ours.py").write_text(OURS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(fp, "REVIEWED_FILE", tmp_path / "fingerprints.json")
    contract.record_rows([weigh(), read(), new()], "pypi", {"up": tmp_path / "now"})
    return tmp_path / "now"


def spec(id, kind, target, provider, **more):
    return PatchSpec(id, f"up.tools:{target}", kind, f"contract_ours:{provider}", "why", "exit", **more)


def weigh(**more):
    return spec("up.weigh", "wrap", "weigh", "wrap", **{"bindings": BINDINGS, **more})


def read():
    return spec("up.read", "replace", "Scale.read", "read")


def new():
    return spec("up.new", "extend", "Scale.new", "new")


def finding(tree, row):
    (found,) = contract.check_rows([row], "pypi", {"up": tree}, installed=False)
    return found


def edit(tree, name, old, text):
    before = (tree / name).read_text()
    assert before.count(old) == 1
    (tree / name).write_text(before.replace(old, text))
    forget_files()


def test_an_unchanged_tree_is_fine_and_says_where_it_looked(tree):
    found = [finding(tree, row) for row in (weigh(), read(), new())]
    assert [(each.state, each.where) for each in found] == [
        ("fine", "up/tools.py:4"),
        ("fine", "up/tools.py:14"),
        ("fine", "up/tools.py"),
    ]
    assert found[0].found == "body as reviewed; 4 binding(s) complete"


@pytest.mark.parametrize(
    ("old", "text", "changed", "where"),
    [
        ("thing * 2", "thing * 3", "up.weigh", "up/tools.py:4"),
        ("class Scale:", "@total_ordering\nclass Scale(Base):", "up.read", "up/tools.py:15"),
    ],
)
def test_a_changed_body_is_named_with_row_file_and_line(tree, old, text, changed, where):
    """Change a token, or the header of a method's class; the other patch stays fine."""
    edit(tree, "up/tools.py", old, text)
    found = {row.id: finding(tree, row) for row in (weigh(), read())}
    assert {found["up.weigh"].state, found["up.read"].state} == {"fine", "problem"}
    assert (found[changed].state, found[changed].where) == ("problem", where)
    assert f"check {changed} --write" in found[changed].todo


@pytest.mark.parametrize(
    ("row", "old", "text", "words"),
    [
        (weigh, "def weigh(", "def weigh_all(", "up.tools has no weigh"),
        (read, "def read(self,", "def reads(self,", "up.tools has no Scale.read"),
        (new, "class Scale:", "class Scales:", "up.tools has no Scale"),
        (new, "        return unit\n", "        return unit\n    def new(self): pass\n", "upstream has this name now"),
    ],
)
def test_a_name_that_went_or_came_is_a_problem(tree, row, old, text, words):
    assert finding(tree, row()).state == "fine"
    edit(tree, "up/tools.py", old, text)
    found = finding(tree, row())
    assert found.state == "problem" and words in found.found


def test_a_module_that_is_missing_or_cannot_be_read_is_a_problem(tree):
    odd = finding(tree, dataclasses.replace(read(), target="up.odd:broken"))
    assert odd.state == "problem" and odd.where == "up/odd.py:1"
    (tree / "up" / "tools.py").rename(tree / "up" / "tool.py")
    assert finding(tree, read()).found == "there is no module up.tools"


@pytest.mark.parametrize(
    ("text", "is_binding"),
    [
        ("from up.tools import weigh\n", True),
        ("if 1:\n    from .tools \\\n        import weigh\n", True),
        ("from up.user import w\n", True),
        ("from up.all import *\n", True),
        ("from up.tools import hidden, \\\n    weigh\n", True),
        ("def f():\n    from up.tools import weigh\n", False),
        ("from up.tools import hidden\n", False),
        ("# from up.tools import weigh\n", False),
    ],
)
def test_a_new_import_elsewhere_is_a_missing_binding(tree, text, is_binding):
    (tree / "up" / "extra.py").write_text(text)
    found = finding(tree, weigh())
    assert (found.state == "problem") is is_binding
    if is_binding:
        assert "1 binding(s) not listed" in found.found and "up.extra:" in found.todo
        assert found.details[0].startswith("up/extra.py:")


def test_an_incomplete_or_wrong_list_of_bindings_is_seen(tree):
    few = finding(tree, weigh(bindings=BINDINGS[1:]))
    assert few.state == "problem" and "up:weigh" in few.todo
    wrong = finding(tree, weigh(bindings=(*BINDINGS, "up.user:only_a_type")))
    assert wrong.state == "problem" and "are not the target: up.user:only_a_type" in wrong.found


def test_a_body_that_was_never_reviewed_is_a_problem(tree):
    unknown = spec("up.hidden", "wrap", "hidden", "wrap")
    assert "never reviewed" in finding(tree, unknown).found


def test_rows_of_other_packages_are_those_of_this_python_or_not_checked(tree):
    provider = "verl_patches.emulation.cpu.torch_on_cpu:factory_on_cpu"
    zeros = PatchSpec("up.zeros", "torch:zeros", "wrap", provider, "why", "exit")
    assert finding(tree, zeros).state == "note" and "not checked: no torch" in finding(tree, zeros).found
    contract.record_rows([zeros], "pypi", {"up": tree}, no_source=True)
    (found,) = contract.check_rows([zeros], "pypi", {"up": tree})
    assert found.state == "fine"
    never = dataclasses.replace(zeros, target="torch:zeroes")
    (found,) = contract.check_rows([never], "pypi", {"up": tree})
    assert found.state == "problem" and found.found == "torch has no zeroes"


@pytest.mark.parametrize("target", ["up.tools:absent", "up.absent:f", "absent:f"])
def test_a_target_that_is_not_there_is_not_recorded(tree, target):
    before, row = fp.REVIEWED_FILE.read_text(), dataclasses.replace(weigh(), target=target)
    with pytest.raises(ConfigError, match="nothing was written"):
        contract.record_rows([read(), row], "pypi", {"up": tree})
    assert fp.REVIEWED_FILE.read_text() == before
