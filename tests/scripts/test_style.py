"""Test the house rules: ruff, types, sizes, no print outside the command line, no path of one machine."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 600, 80
# a capital or a quoted name at the beginning, no preposition, question word or error, and an end
SENTENCE = re.compile(
    r"(?!(?:Of|What|Whose|Whether|Where|With|As|By|In|On|From|To|\w*Error|Row provider)\b)[A-Z`].*[.:]`?$"
)


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


def fragments(text: str) -> list[str]:
    """Return the first sentences of docstrings that do not begin as one, or do not end."""
    defined = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    documents = [ast.get_docstring(node) for node in ast.walk(ast.parse(text)) if isinstance(node, defined)]
    firsts = [" ".join(document.split("\n\n")[0].split()) for document in documents if document]
    return [first for first in firsts if not SENTENCE.match(first)]


def test_docstrings_begin_with_a_sentence():
    found = {
        str(file.relative_to(ROOT)): wrong for file in sources("verl_patches") if (wrong := fragments(file.read_text()))
    }
    assert not found
    for first in ("Of a step.", "ConfigError where it is not.", "{name: bytes} of a rank.", "Return it"):  # the control
        assert fragments(f'def f():\n    """{first}"""')


def test_nothing_names_the_machine_it_was_written_on():
    folders = ("verl_patches", "scripts", "configs", "data", "tests")
    files = [f for folder in folders for f in (ROOT / folder).rglob("*") if f.suffix in {".py", ".sh", ".yaml", ".txt"}]
    machine = re.compile(r"/work" + r"/|/root" + r"/|/tmp" + r"/br")
    assert machine.search("cd /work" + "/main")
    named = [str(f.relative_to(ROOT)) for f in files if machine.search(f.read_text(errors="replace"))]
    assert not named
