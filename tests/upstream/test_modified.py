"""Test that modified sources never pass as their pin: checkouts by git, packages by version, at a start or recorded."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import composed
from tests.upstream.small_upstream import WORKER, WORKER_TEXT, commit, git, make_line
from verl_patches.errors import ConfigError
from verl_patches.patching.boot.install_prelude import PRELUDE_LINE
from verl_patches.spec import Trees
from verl_patches.upstream.checkouts import find_trees
from verl_patches.upstream.modified import package_roots, refuse_modified, source_findings
from verl_patches.upstream.pins import Repository, load_pins

FILES = {
    WORKER: WORKER_TEXT,
    "verl/a.py": "a = 1\n",
    "verl/data.txt": "d\n",
    ".gitignore": "*.pyc\n*.so\n/verl/_version.py\n",
}


@pytest.fixture
def tree(tmp_path):
    """Make a clone of one commit, and the line that pins it."""
    folder = tmp_path / "verl"
    folder.mkdir()
    git(folder, "init", "-q")
    head = commit(folder, FILES)
    return folder, make_line(verl=Repository(urls=("u",), commit=head, version="1", packages=("verl",)))


def tree_finding(tree):
    folder, line = tree
    (finding,) = source_findings(line, {"verl": folder})
    return finding


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text) if text is not None else (folder / name).unlink()


def test_files_that_are_no_change(tree):
    """Accept the prelude line, ignored files and executable bits, whoever owns the clone."""
    worker = f"{PRELUDE_LINE}\n{WORKER_TEXT}"
    write(tree[0], {WORKER: worker, "verl/__pycache__/a.pyc": "x", "verl/_version.py": "v = 1"})
    (tree[0] / "verl/a.py").chmod(0o755)
    assert tree_finding(tree).state == "fine" and tree_finding(tree).details == ()


@pytest.mark.parametrize(
    ("files", "named"),
    [
        ({"verl/a.py": "a = 2\n"}, "verl/a.py (modified)"),
        ({"new/deep/x.txt": "x"}, "new/deep/x.txt (extra)"),
        ({WORKER: f"{PRELUDE_LINE}\n{WORKER_TEXT}x = 1\n"}, f"{WORKER} (modified)"),
    ],
)
def test_files_that_are_a_change(tree, files, named):
    write(tree[0], files)
    finding = tree_finding(tree)
    assert (finding.state, finding.details) == ("problem", (named,)) and named in finding.found


def test_a_staged_change_and_another_commit_are_found(tree):
    write(tree[0], {"verl/a.py": "a = 2\n"})
    git(tree[0], "add", "-A")
    assert tree_finding(tree).details == ("verl/a.py (modified)",)
    mine = commit(tree[0], {})
    finding = tree_finding(tree)
    assert finding.state == "problem" and f"found {mine}" in finding.found and finding.details == ()


def test_a_tree_that_cannot_be_compared_is_a_problem(tree):
    shutil.rmtree(tree[0] / ".git")
    assert "cannot be compared" in tree_finding(tree).found and tree_finding(tree).state == "problem"
    git(tree[0], "init", "-q")
    assert "cannot be compared" in tree_finding(tree).found and tree_finding(tree).state == "problem"


def test_an_installed_package_is_compared_by_its_version_and_a_copy_is_not(tmp_path):
    line, roots = load_pins().line("pypi"), package_roots("pypi", Trees())
    assert [f.state for f in source_findings(line, roots)] == ["fine", "fine", "fine"]
    other = line.model_copy(update={"packages": {**line.packages, "verl": "0.5.0"}})
    found = {f.name: f for f in source_findings(other, roots)}
    assert [f.name for f in found.values() if f.state == "problem"] == ["verl"]
    assert found["verl"].todo.endswith("pip install --force-reinstall --no-deps verl==0.5.0")
    (copy,) = source_findings(line, {"verl": tmp_path})
    assert copy.state == "note" and "not compared" in copy.found


@pytest.mark.slow
@pytest.mark.upstream
def test_the_trees_of_line_a3(pytestconfig, tmp_path):
    """Accept the fetched trees; one edit in a file of MindSpeed-LLM that no row targets is refused and named."""
    given = Path(pytestconfig.getoption("--upstream")).absolute()
    line, trees = load_pins().line("a3"), find_trees(given)
    assert [f for f in source_findings(line, package_roots("a3", trees)) if f.state != "fine"] == []
    for name in ("verl", "Megatron-LM", "MindSpeed"):
        (tmp_path / name).symlink_to(given / name)
    subprocess.run(["git", "clone", "-q", "--shared", given / "MindSpeed-LLM", tmp_path / "MindSpeed-LLM"], check=True)
    run = composed("deepseekv3_tiny_cpu", ["recipe.line=a3"], find_trees(tmp_path))
    file = tmp_path / "MindSpeed-LLM/mindspeed_llm/tasks/preprocess/parser.py"
    assert refuse_modified(run) == {}
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="MindSpeed-LLM .*tasks/preprocess/parser.py"):
        refuse_modified(run)
    warned = replace(run, recipe=replace(run.recipe, drift="warn"))
    assert refuse_modified(warned) == {"MindSpeed-LLM": ["mindspeed_llm/tasks/preprocess/parser.py (modified)"]}
