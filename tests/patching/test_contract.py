"""Test the contract check on a small upstream package: each kind of change is reported, an unchanged tree passes."""

import dataclasses
import json
from importlib.metadata import version

import pytest

from verl_patches.patching import contract
from verl_patches.patching import fingerprint as fp
from verl_patches.patching.contract import Sources
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
    targets = [row().target for row in (weigh, read, new)]
    fp.write_reviewed("pypi", {target: fp.fingerprint(target, tmp_path / "now") for target in targets})
    return tmp_path / "now"


def spec(id, kind, target, provider, **more):
    return PatchSpec(id, f"up.tools:{target}", kind, f"contract_ours:{provider}", "why", "exit", **more)


def weigh(**more):
    return spec("up.weigh", "wrap", "weigh", "wrap", **{"bindings": BINDINGS, **more})


def read():
    return spec("up.read", "replace", "Scale.read", "read")


def new():
    return spec("up.new", "extend", "Scale.new", "new")


def check_tree(tree, *rows, line="pypi", **more):
    report = contract.check_rows(rows, line, Sources({"up": tree}, installed=False, **more))
    return report, {f.name: f for f in report.findings}


def finding(tree, row, **more):
    return check_tree(tree, row, **more)[1][row.id]


def edit(tree, name, old, text):
    before = (tree / name).read_text()
    assert before.count(old) == 1
    (tree / name).write_text(before.replace(old, text))


def test_an_unchanged_tree_is_fine_and_says_where_it_looked(tree):
    report, found = check_tree(tree, weigh(), read(), new())
    assert report.exit_code == 0 and report.state == "fine", report.as_dict()
    assert found["up.weigh"].where == "up/tools.py:4" and found["up.read"].where == "up/tools.py:14"
    assert found["up.weigh"].found == "body as reviewed; 4 binding(s) complete"
    assert found["package up"].found.startswith("6 Python files, 2 of them cannot be parsed")
    assert [detail.partition(":")[0] for detail in found["package up"].details] == ["up.latin", "up.odd"]
    assert found["package up"].state == "note"
    assert str(tree) not in json.dumps(report.as_dict()["rows"][1:])


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
    report, found = check_tree(tree, weigh(), read())
    assert report.exit_code == 1 and {found["up.weigh"].state, found["up.read"].state} == {"fine", "problem"}
    assert (found[changed].state, found[changed].where) == ("problem", where)
    assert f"explain {changed} " in found[changed].todo and f"fingerprint {changed} --write" in found[changed].todo


@pytest.mark.parametrize(
    ("row", "old", "text", "words"),
    [
        (weigh, "def weigh(", "def weigh_all(", "similar name: weigh_all, line 4"),
        (read, "def read(self,", "def reads(self,", "similar name: reads, line 14"),
        (new, "        return unit\n", "        return unit\n    def new(self): pass\n", "upstream has this name now"),
    ],
)
def test_a_name_that_went_or_came_is_a_problem(tree, row, old, text, words):
    assert finding(tree, row()).state == "fine"
    edit(tree, "up/tools.py", old, text)
    found = finding(tree, row())
    assert found.state == "problem" and words in "; ".join((found.found, *found.details))


def test_a_module_that_is_missing_or_cannot_be_read_is_a_problem(tree):
    odd = finding(tree, dataclasses.replace(read(), target="up.odd:broken"))
    assert odd.state == "problem" and "up/odd.py:1" in odd.found
    (tree / "up" / "tools.py").rename(tree / "up" / "tool.py")
    assert "similar name: up.tool" in finding(tree, read()).details


@pytest.mark.parametrize(
    ("text", "is_binding"),
    [
        ("from up.tools import weigh\n", True),
        ("from up import (a,\n  weigh)\n", True),
        ("if 1:\n    from .tools \\\n        import weigh\n", True),
        ("from up.user import w\n", True),
        ("from up.all import *\n", True),
        ("from .import weigh\n", True),
        ("from up.tools import hidden, \\\n    weigh\n", True),
        ("def f():\n    from up.tools import weigh\n", False),
        ("from other.tools import weigh\n", False),
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


@pytest.mark.parametrize(
    ("pinned", "state", "text"),
    [(None, "note", "pins no version"), ("0.1", "note", "pinned 0.1"), ("here", "fine", "as pinned")],
)
def test_compiled_targets_are_identified_by_the_version(tree, pinned, state, text):
    provider = "verl_patches.emulation.cpu.torch_on_cpu:factory_on_cpu"
    zeros = PatchSpec("up.zeros", "torch:zeros", "wrap", provider, "why", "exit")
    fp.write_reviewed("pypi", {"torch:zeros": fp.NO_SOURCE})
    versions = {} if pinned is None else {"torch": version("torch") if pinned == "here" else pinned}
    report = contract.check_rows([zeros], "pypi", Sources({"up": tree}, versions=versions))
    assert report.findings[1].state == state and text in report.findings[1].found
    never = dataclasses.replace(zeros, target="torch:zeroes")
    assert contract.check_rows([never], "pypi", Sources({"up": tree}, versions=versions)).exit_code == 1


def test_packages_outside_the_tree_are_named_and_compared_at_the_pinned_version_only(tree):
    target, ours = "torch.cuda:device_count", "verl_patches.emulation.cpu.torch_on_cpu:device_count"
    bindings = ("torch.cuda.random:device_count",)
    row = PatchSpec("up.torch", target, "replace", ours, "why", "exit", bindings=bindings)
    found = finding(tree, row, versions={"torch": "0.1"})
    assert found.state == "note" and "of this interpreter was checked" in found.found
    assert "body not compared: the pin is torch 0.1" in found.found
