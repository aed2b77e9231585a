"""Test that modified sources never pass as their pin: checkouts by git, packages by RECORD, at a start or recorded."""

import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.runs import composed
from tests.upstream.small_upstream import WORKER, WORKER_TEXT, commit, git, install, make_line
from verl_patches.errors import ConfigError
from verl_patches.patching.boot.install_prelude import PRELUDE_LINE
from verl_patches.patching.contract import installed_root
from verl_patches.spec import RunSpec, Trees
from verl_patches.upstream.checkouts import find_trees
from verl_patches.upstream.modified import (
    package_roots,
    record_changes,
    record_digest,
    refuse_modified,
    source_findings,
)
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
    write(
        tree[0], {WORKER: f"{PRELUDE_LINE}\n{WORKER_TEXT}", "verl/__pycache__/a.pyc": "x", "verl/_version.py": "v = 1"}
    )
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


@pytest.fixture
def installed(tmp_path):
    """Return a function that checks a small verl, installed in tmp_path, whose RECORD is pinned."""
    install(tmp_path, "verl", "0.4.0", {"verl/a.py": "a = 1\n", "verl/b.yaml": "b\n", WORKER: WORKER_TEXT})
    record = tmp_path / "verl-0.4.0.dist-info/RECORD"
    digests = {"verl": (record_digest("verl", record),)}
    line = load_pins().line("pypi").model_copy(update={"records": digests})

    def package_finding():
        (found,) = source_findings(line, {"verl": tmp_path})
        return found

    return package_finding


def test_an_installed_package_is_compared_with_its_record(tmp_path, installed):
    (tmp_path / WORKER).write_text(f"{PRELUDE_LINE}\n{WORKER_TEXT}")
    write(tmp_path, {"verl/__pycache__/a.pyc": "x", "other.pth": "x", "verl/ops.txt": "x"})
    record = tmp_path / "verl-0.4.0.dist-info/RECORD"
    added = ["../../../bin/verl,sha256=x,3", "verl/__pycache__/a.cpython-311.pyc,,"]  # pip adds such lines
    record.write_text("\n".join([*reversed(record.read_text().splitlines()), *added]) + "\n")
    assert (installed().state, installed().details) == ("fine", ())
    (tmp_path / "verl/b.yaml").unlink()
    write(tmp_path, {"verl/a.py": "a = 2\n", "verl/c.py": "", "verl/a.abi3.so": "x"})
    found = ("verl/a.abi3.so (extra)", "verl/a.py (modified)", "verl/b.yaml (deleted)", "verl/c.py (extra)")
    assert (installed().state, installed().details) == ("problem", found)


def test_a_file_edited_together_with_its_line_in_the_record_is_seen(tmp_path, installed):
    files = {"verl/a.py": "a = 2\n", "verl/b.yaml": "b\n", WORKER: WORKER_TEXT}
    install(tmp_path, "verl", "0.4.0", files)
    record = tmp_path / "verl-0.4.0.dist-info/RECORD"
    assert record_changes("verl", tmp_path, record) == []  # control: RECORD alone does not show the edit
    assert installed().state == "problem" and record_digest("verl", record) in installed().found
    install(tmp_path, "verl", "0.4.0", files | {"verl/a.py": "a = 1\n"})
    assert installed().state == "fine"
    install(tmp_path, "another", "1.0", files)  # its RECORD lists the same files and is read before verl's
    assert installed().state == "problem" and "another-1.0.dist-info" in installed().found


def run_over(line: str, trees: Trees, drift: str = "strict") -> RunSpec:
    run = composed("deepseekv3_tiny_cpu", [f"recipe.line={line}"], trees)
    return replace(run, recipe=replace(run.recipe, drift=drift))


@pytest.mark.slow
def test_a_start_over_an_edited_package_is_refused_or_marked(tmp_path):
    """Start over the installed packages, then over a copied verl with one edit in a file that no row targets."""
    assert refuse_modified(run_over("pypi", Trees())) == {}
    shutil.copytree(installed_root("verl") / "verl", tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    trees = Trees(("--verl-path", str(tmp_path)), (tmp_path,), tmp_path)
    assert refuse_modified(run_over("pypi", trees)) == {}
    file = tmp_path / "verl/utils/torch_dtypes.py"
    file.write_text(file.read_text() + "# edited\n")
    with pytest.raises(ConfigError, match=r"verl/utils/torch_dtypes.py \(modified\)"):
        refuse_modified(run_over("pypi", trees))
    assert refuse_modified(run_over("pypi", trees, "warn")) == {"verl": ["verl/utils/torch_dtypes.py (modified)"]}


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
    run, file = (
        run_over("a3", find_trees(tmp_path)),
        tmp_path / "MindSpeed-LLM/mindspeed_llm/tasks/preprocess/parser.py",
    )
    assert refuse_modified(run) == {}
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(ConfigError, match="MindSpeed-LLM .*tasks/preprocess/parser.py"):
        refuse_modified(run)
