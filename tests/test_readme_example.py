"""Test the example of docs/patches.md by carrying it out as written in a copy of the repository."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"<!-- example: (\S+) -->\n```\w+\n(.*?)```", re.DOTALL)
PAGE = "docs/patches.md"
PROVIDER, TEST = "verl_patches/trainer/finite_rewards.py", "tests/trainer/test_finite_rewards.py"
ROW_ABOVE = "UPDATE: tuple[PatchSpec, ...] = (\n"


def examples():
    """Return {name: text} of provider, row, test and commands."""
    parts = dict(EXAMPLE.findall((ROOT / PAGE).read_text()))
    assert len(parts) == 4 and {"row", "commands"} < parts.keys()
    return parts


def run(folder, *command, **variables):
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def add_example(folder, parts):
    for name, text in parts.items():
        if name.startswith("verl_patches/"):
            (folder / name).write_text(text)
    catalog = folder / "verl_patches" / "catalog.py"
    assert catalog.read_text().count(ROW_ABOVE) == 1
    catalog.write_text(catalog.read_text().replace(ROW_ABOVE, f"{ROW_ABOVE}{parts['row'].rstrip()},\n"))


@pytest.mark.slow
def test_the_example_works_as_written(repository_copy):
    """Call its test with a `run_python` for the copy; it must fail with a provider that does nothing."""
    parts, module = examples(), {}
    add_example(repository_copy, parts)
    *commands, tests = parts["commands"].strip().splitlines()
    reviewed, table = (line.split()[1:] for line in commands[1:])
    for check in (reviewed, table[:1]):  # with the row alone the review and the table are missing
        assert run(repository_copy, *check).returncode == 1
    for line in commands:
        done = run(repository_copy, *line.split()[1:])
        assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert run(repository_copy, *table[:1]).returncode == 0
    assert "- `advantage.finite_rewards` (pypi)" in (repository_copy / PAGE).read_text()
    assert tests.split()[:3] == ["bash", "scripts/test.sh", TEST]

    def run_python(code, patches):
        done = run(repository_copy, "-c", code, VERL_PATCHES=patches)
        return SimpleNamespace(rc=done.returncode, err=done.stderr)

    exec(compile(parts[TEST], TEST, "exec"), module)
    test = module["test_nan_reward_is_refused"]
    (cases,) = test.pytestmark
    for refused in cases.args[1]:
        test(run_python, refused)
    (repository_copy / PROVIDER).write_text("refuse_nan = lambda original: original\n")
    with pytest.raises(AssertionError):
        test(run_python, True)
