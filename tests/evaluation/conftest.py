"""The command line in this process."""

import signal
import sys

import pytest

from verl_patches.__main__ import main


@pytest.fixture
def call(monkeypatch, capsys):
    """call(command) -> (exit code, stdout, stderr) of the command line in this process."""

    def run(words):
        monkeypatch.setattr(sys, "argv", ["verl_patches", *words])
        code = 0
        signal.alarm(600)  # a FIFO that is opened would be waited for
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
        finally:
            signal.alarm(0)
        return code, *capsys.readouterr()

    def hangs(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, hangs)
    yield run
    signal.signal(signal.SIGALRM, before)
