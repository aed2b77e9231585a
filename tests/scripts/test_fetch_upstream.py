"""scripts/fetch_upstream.sh finds a Python and hands over; the command behind it refuses wrong use with exit 2."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "scripts/fetch_upstream.sh"


@pytest.fixture
def clone(tmp_path):
    """The script in a folder of its own; `python(place)` puts a Python there that writes down its arguments."""
    root = tmp_path / "re po"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / SCRIPT, root / SCRIPT)

    def python(place: Path, has_modules: bool = True) -> None:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(
            f'#!/bin/sh\n[ "$1" != -c ] || exit {0 if has_modules else 1}\n'
            'printf "<%s>" "$0" "$PYTHONPATH" "$@"; exit 7\n'
        )
        place.chmod(0o755)

    return root, python


def call(root: Path, *args: str, path: Path | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env["PATH"] = f"{path}:{env['PATH']}" if path else env["PATH"]
    return subprocess.run(
        ["bash", str(root / SCRIPT), *args],
        cwd=cwd or root,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_it_hands_its_arguments_to_the_environments_python(clone):
    root, python = clone
    python(root / ".venv" / "bin" / "python")
    done = call(root, "--mirror", "a b", "--json", cwd=Path("/"))
    assert done.returncode == 7
    assert done.stdout == (
        f"<{root}/.venv/bin/python><{root}><-m><verl_patches><fetch-upstream><--mirror><a b><--json>"
    )


def test_without_an_environment_it_takes_python3(clone, tmp_path):
    root, python = clone
    python(tmp_path / "bin" / "python3")
    done = call(root, path=tmp_path / "bin")
    assert done.returncode == 7 and "<fetch-upstream>" in done.stdout


def test_a_python_without_the_modules_is_a_sentence(clone, tmp_path):
    root, python = clone
    python(tmp_path / "bin" / "python3", has_modules=False)
    done = call(root, path=tmp_path / "bin")
    assert done.returncode == 2
    assert f"pip install -r {root}/requirements.txt" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--line", "b7"], "--line b7: expected one of pypi, a3"),
        (["--line", "pypi"], "has no repositories"),
        (["--only", "ver1"], "expected names among verl, Megatron-LM"),
        (["--mirror", "{tmp}"], "git clone --mirror https://github.com/volcengine/verl.git {tmp}/verl.git"),
    ],
)
def test_wrong_use_is_a_sentence_and_exit_2(tmp_path, args, words):
    given = [arg.format(tmp=tmp_path) for arg in args]
    done = call(ROOT, *given, "--dest", str(tmp_path / "dest"))
    assert done.returncode == 2, done.stdout + done.stderr
    assert words.format(tmp=tmp_path) in done.stderr
    assert not (tmp_path / "dest" / "verl").exists()


def test_what_it_clones_is_ignored_by_git():
    done = subprocess.run(["git", "-C", str(ROOT), "check-ignore", "upstream/verl/setup.py"], capture_output=True)
    assert done.returncode == 0
