"""Test the house rules: ruff, types, sizes, no print outside the command line, no path of one machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import check_style
import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80


def sources(*folders: str) -> list[Path]:
    return sorted(p for folder in folders for p in (ROOT / folder).rglob("*.py"))


def long_functions(text: str) -> list[str]:
    return [
        f"{node.name} ({node.end_lineno - node.lineno + 1} lines)"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


@pytest.mark.parametrize("command", ["check --output-format=concise", "format --check"])
def test_ruff_is_clean(command):
    ruff = [sys.executable, "-m", "ruff", *command.split(), "--no-cache", str(ROOT)]
    done = subprocess.run(ruff, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr


def mypy(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "mypy", "--cache-dir", "/dev/null", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_types_are_right(tmp_path):
    """Check the types of the files that pyproject.toml lists."""
    done = mypy()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    wrong = tmp_path / "wrong.py"
    wrong.write_text("from verl_patches.patching.spec import split_place\n\nplace: int = split_place('m:f')\n")
    assert "Incompatible types in assignment" in mypy(str(wrong)).stdout  # the control


def test_files_and_functions_stay_small():
    files = sources("verl_patches", "scripts", "data", "tests")
    assert len(files) > 10
    too_long = {str(f.relative_to(ROOT)): n for f in files if (n := len(f.read_text().splitlines())) > MAX_FILE_LINES}
    assert not too_long
    functions = {str(f.relative_to(ROOT)): found for f in files if (found := long_functions(f.read_text()))}
    assert not functions
    assert long_functions("def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES)  # the check can fail


def test_sentences_names_and_citations_keep_the_rules():
    names = check_style.all_files()
    assert len(names) > 500
    found = {name: wrong for name in names if (wrong := check_style.faults(name, (ROOT / name).read_text()))}
    assert not found


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ('def f():\n    """Of a step."""', "docstring"),
        ('def f():\n    """ConfigError where it is not."""', "docstring"),
        ('def f():\n    """{name: bytes} of a rank."""', "docstring"),
        ('def f():\n    """Return it"""', "docstring"),
        ("def _layers_of(model): ...", "name"),
        ("# see config.py" + ":695", "citation"),
        ("# (config.py, " + ":94)", "citation"),
        ("# Whose a checkpoint is: see below.", "phrase"),
        ("raise ValueError('bytes of all files, but of what is removed')", "phrase"),
    ],
)
def test_a_broken_rule_is_found(text, rule):
    assert [fault.rule for fault in check_style.faults("verl_patches/a.py", text)] == [rule]


def test_nothing_names_the_machine_it_was_written_on():
    folders = ("verl_patches", "scripts", "configs", "data", "tests")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in {".py", ".sh", ".yaml", ".txt"}]
    machine = re.compile(r"/work" + r"/|/root" + r"/|/tmp" + r"/br")
    assert machine.search("cd /work" + "/main")
    named = [str(f.relative_to(ROOT)) for f in files if machine.search(f.read_text(errors="replace"))]
    assert not named
