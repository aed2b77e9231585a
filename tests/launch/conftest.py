"""Start a launcher whose driver is the test's own code."""

import json
import sys
from pathlib import Path

import pytest

from tests.launch.drivers import run_named_t
from verl_patches.launch import launcher


@pytest.fixture
def start(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("verl_patches.processes.TERM_S", 0.5)
    monkeypatch.setattr(launcher, "MEMORY_S", 0.0)  # memory is sampled at every poll

    def run(code: str, on_line=None, dirty=None, trainer=(), **recipe):
        lines, looks = [], 0

        def said(line):
            nonlocal looks
            looks += (tmp_path / "t/latest/ready").exists()
            if looks == 2:
                (tmp_path / "t/latest/gate").touch()
            (on_line or lines.append)(line)

        settings = {"default_local_dir": str(tmp_path / "t/checkpoints"), **dict(trainer)}
        monkeypatch.setattr(launcher, "driver_command", lambda *_: [sys.executable, "-c", code])
        outcome = launcher.run(run_named_t(tmp_path, recipe, settings), said, dirty)
        return outcome, json.loads((outcome.folder / "summary.json").read_text()), [*filter(None, lines)]

    return run
