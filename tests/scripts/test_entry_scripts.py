"""Test that the scripts set up or find a Python and pass on: arguments unchanged, exit code kept, no standard input."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted([*ROOT.glob("scripts/*.sh"), ROOT / ".ci" / "run"])


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path):
    """Copy the scripts to a folder of their own, where set-up and Python only print how they were called."""
    root = tmp_path / "re po"
    for script in SCRIPTS:
        (root / script.relative_to(ROOT)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script, root / script.relative_to(ROOT))
    (root / "scripts" / "setup.sh").write_text('printf "setup %s\\n" "$*"; [ ! -e broken ]\n')
    (root / "scripts" / "fetch_upstream.sh").write_text('printf "<%s>" fetch "$@"; [ ! -e unfetched ]\n')
    for venv in (".venv", "other"):
        program = '[ "$1" != -c ] || exit 0; printf "<%s>" "$0" "$@" "path=$PYTHONPATH"; cat; exit 7'
        write_program(root / venv / "bin" / "python", program)
    return root


def call(root: Path, script: str, *args: str, cwd: Path | None = None, **env: str) -> tuple[int, str]:
    command = ["bash", str(root / script), *args]
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run(command, cwd=cwd or root, env={**os.environ, "CI": "true", **env}, **streams)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        (
            "scripts/test.sh",
            "--nightly -k 'a or b' 'tests/x y'",
            "<--no-loadscope-reorder><--nightly><-k><a or b><tests/x y>",
        ),
        ("scripts/test.sh", "--upstream up", "<--upstream={root}/scripts/up>"),
        ("scripts/test.sh", "--venv ../other", "<{root}/scripts/../other/bin/python>"),
        ("scripts/smoke.sh", "--steps 3 \"trainer.x='a b'\"", "<verl_patches><smoke><--steps><3><trainer.x='a b'>"),
        ("scripts/recipes.sh", "--only rloo", "<{root}/scripts/recipe_runs.py><--only><rloo>"),
        (".ci/run", "", "<--no-loadscope-reorder><--full><--durations=30>"),
        (".ci/run", "", "mirrors.tar"),
    ],
)
def test_arguments_and_exit_code_are_passed_on(clone, script, arguments, words):
    code, out = call(clone, script, *shlex.split(arguments), cwd=clone / "scripts")
    assert code == 7 and words.format(root=clone) in out and "<fetch>" not in out, out


@pytest.mark.parametrize("script", ["scripts/test.sh", "scripts/smoke.sh", ".ci/run"])
def test_a_failed_set_up_ends_the_script(clone, script):
    (clone / "broken").touch()
    code, out = call(clone, script)
    assert code == 1 and "<-m>" not in out


def test_ci_tests_the_line_whose_sources_are_there(clone):
    mirrors = clone.parent / "shared" / "upstream"
    for name in ("verl", "MindSpeed"):
        (mirrors / f"{name}.git").mkdir(parents=True)
    subprocess.run(["tar", "-C", mirrors, "-cf", mirrors / "mirrors.tar", "verl.git", "MindSpeed.git"], check=True)
    code, out = call(clone, ".ci/run", cwd=Path("/"))
    fetched, dest = re.search(r"(<fetch>.*<--dest><(.*?)>.*?)<[^>]*python>", out, re.DOTALL).groups()
    assert code == 7 and not Path(dest).exists()  # pytest's own code; nothing is left
    assert "<--line><a3>" in fetched and "<--only><MindSpeed><--only><verl>" in fetched
    assert f"<--full><--durations=30><--upstream={dest}>" in out
    (clone / "unfetched").touch()
    code, out = call(clone, ".ci/run", cwd=Path("/"))
    assert code == 1 and "<--full>" not in out


def test_fetching_with_a_python3_that_lacks_modules_names_the_remedy(clone):
    shutil.rmtree(clone / ".venv")
    write_program(clone / "bin/python3", "exit 1")
    shutil.copy(ROOT / "scripts/fetch_upstream.sh", clone / "scripts")
    code, out = call(clone, "scripts/fetch_upstream.sh", PATH=f"{clone / 'bin'}:{os.environ['PATH']}")
    assert code == 2 and f"pip install -r {clone}/requirements.txt" in out


def test_a_python_without_the_pins_is_told_what_is_missing_in_one_line():
    command = ["-m", "verl_patches", "--help"]
    done = subprocess.run(
        [sys.executable, "-S", *command], cwd=ROOT, capture_output=True, text=True
    )  # no site-packages
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert all(word in done.stderr for word in ("typer", "scripts/setup.sh", ".venv/bin/activate"))
    assert subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True).returncode == 0  # control


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_are_bash_that_stops_at_errors(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text and os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
