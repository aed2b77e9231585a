"""docs/writing-patches.md, carried out as it stands in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
PAGE, TABLE = "docs/writing-patches.md", "docs/patches.md"
COPIED = ("verl_patches", "configs", "scripts", "tests", "docs", "README.md", "README_zh.md",
          "pyproject.toml", "requirements.txt")
ROW_ABOVE = "TRAINING: tuple[PatchSpec, ...] = (\n"


def examples():
    return dict(EXAMPLE.findall((ROOT / PAGE).read_text()))


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("with_example")
    for name in COPIED:
        source, ignore = ROOT / name, shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, folder / name, ignore=ignore) if source.is_dir() else shutil.copy(source, folder / name)
    return folder


def run(folder, *command):
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def add(folder, parts):
    for name, text in parts.items():
        if name.endswith(".py"):
            (folder / name).write_text(text)
    catalog = folder / "verl_patches" / "catalog.py"
    assert catalog.read_text().count(ROW_ABOVE) == 1
    catalog.write_text(catalog.read_text().replace(ROW_ABOVE, ROW_ABOVE + parts["row"]))


def test_the_page_shows_provider_row_test_and_commands():
    assert len(examples()) == 4 and {"row", "commands"} < examples().keys()


@pytest.mark.slow
def test_the_example_works_as_written(copy):
    parts = examples()
    add(copy, parts)
    pytest_quietly = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
    stale = run(copy, *pytest_quietly, "tests/test_catalog.py", "-k", "reviewed or table")
    assert stale.returncode == 1, stale.stdout  # a row alone is not enough: no reviewed body, a stale table
    for line in parts["commands"].strip().splitlines():
        words = line.split()
        if words[0] == "bash":  # test.sh would make an environment of its own first
            words = ["python", *pytest_quietly, *words[2:]]
        done = run(copy, *words[1:])
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "| `advantage.finite_rewards` |" in (copy / TABLE).read_text()
