"""Run the command line in this process."""

import sys

import pytest

from verl_patches.__main__ import main


@pytest.fixture
def call(monkeypatch, capsys):
    """Return call(command) -> (exit code, stdout, stderr), which runs the command line in this process."""

    def run(words):
        monkeypatch.setattr(sys, "argv", ["verl_patches", *words])
        code = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        return code, *capsys.readouterr()

    return run
