"""test.sh, smoke.sh and .ci/run only set up, then hand over: arguments unchanged, exit code kept, no standard input."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])


@pytest.fixture
def clone(tmp_path):
    """The scripts in a folder of their own, where set-up and Python only write down how they were called."""
    for script in SCRIPTS:
        target = tmp_path / "re po" / script.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, target)
    root = tmp_path / "re po"
    (root / "scripts" / "setup.sh").write_text('printf "setup %s\\n" "$*"; [ ! -e broken ]\n')
    (root / "scripts" / "fetch_upstream.sh").write_text('printf "<%s>" fetch "$@"; [ ! -e unfetched ]\n')
    for venv in (".venv", "other"):
        python = root / venv / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text('#!/bin/sh\nprintf "<%s>" "$0" "$@"; cat; exit 7\n')
        python.chmod(0o755)
    return root


def call(root: Path, script: str, *args: str, cwd: Path | None = None) -> tuple[int, str]:
    done = subprocess.run(
        ["bash", str(root / script), *args],
        cwd=cwd or root,
        env={**os.environ, "CI": "true"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout + done.stderr


def test_test_sh_keeps_arguments_and_exit_code(clone):
    code, out = call(clone, "scripts/test.sh", "-m", "not slow", "--full", "tests/x y")
    assert code == 7
    assert "<--no-loadscope-reorder><-m><not slow><--full><tests/x y>" in out


def test_test_sh_takes_folders_relative_to_where_it_is_called(clone):
    code, out = call(clone, "scripts/test.sh", "--upstream", "up", "--venv", "../other", cwd=clone / "scripts")
    assert code == 7
    assert f"<--upstream={clone}/scripts/up>" in out
    assert f"<{clone}/scripts/../other/bin/python>" in out


@pytest.mark.parametrize("script", ["scripts/test.sh", "scripts/smoke.sh", ".ci/run"])
def test_a_failed_set_up_ends_there(clone, script):
    (clone / "broken").touch()
    code, out = call(clone, script)
    assert code == 1
    assert "<-m>" not in out


def test_smoke_sh_hands_its_arguments_to_the_command_line(clone):
    code, out = call(clone, "scripts/smoke.sh", "--steps", "3", "trainer.x='a b'")
    assert code == 7
    assert "<-m><verl_patches><smoke><--steps><3><trainer.x='a b'>" in out


def test_ci_runs_everything_and_says_what_it_goes_without(clone):
    code, out = call(clone, ".ci/run", cwd=Path("/"))
    assert code == 7
    assert "<--no-loadscope-reorder><--full>" in out and "mirrors.tar" in out and "<fetch>" not in out


def test_ci_tests_the_line_whose_sources_are_there(clone):
    mirrors = clone.parent / "shared" / "upstream"
    for name in ("verl", "MindSpeed"):
        (mirrors / f"{name}.git").mkdir(parents=True)
    subprocess.run(["tar", "-C", mirrors, "-cf", mirrors / "mirrors.tar", "verl.git", "MindSpeed.git"], check=True)
    code, out = call(clone, ".ci/run", cwd=Path("/"))
    fetched, dest = re.search(r"(<fetch>.*<--dest><(.*?)>.*?)<[^>]*python>", out, re.DOTALL).groups()
    assert code == 7 and not Path(dest).exists()  # pytest's own code; nothing is left
    assert "<--line><a3>" in fetched and "<--only><MindSpeed><--only><verl>" in fetched
    assert f"<--full><--upstream={dest}>" in out
    (clone / "unfetched").touch()
    code, out = call(clone, ".ci/run", cwd=Path("/"))
    assert code == 1 and "<--full>" not in out


def test_help_and_missing_values(clone):
    assert "--upstream DIR" in call(clone, "scripts/test.sh", "--help")[1]
    code, out = call(clone, "scripts/test.sh", "--upstream")
    assert code == 2
    assert "needs a folder" in out


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_bash_that_stops_at_errors(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
