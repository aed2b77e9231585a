"""Programs of the tests in the place of ssh, docker and a scheduler's."""

import os

import pytest


@pytest.fixture
def program(tmp_path, monkeypatch):
    """program(name, bash): a program on PATH; each call is a line of the file `calls`."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(name, text):
        path = tmp_path / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {tmp_path}/calls\n{text}\n')
        path.chmod(0o755)
        return path

    make.calls = lambda: (tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else ""
    make.docker = lambda: [line for line in make.calls().splitlines() if line.startswith("docker ")]
    return make
