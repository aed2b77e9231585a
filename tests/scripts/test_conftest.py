"""The fixtures that all tests lean on: a fresh process with known switches, killed as a whole when it hangs."""

import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests import conftest


def test_run_python_sets_only_the_switches_it_is_given(run_python, monkeypatch):
    monkeypatch.setenv("VERL_PATCHES", "line=a3")
    show = "import os, sys, verl_patches; print(os.environ.get('VERL_PATCHES'), sys.argv[1:])"
    assert run_python(show, "x").check().out == "None ['x']\n"
    assert run_python(show, patches="line=pypi,platform=cpu").out.startswith("line=pypi,platform=cpu ")


def test_run_python_reports_a_failure(run_python):
    done = run_python("import sys; print('said'); sys.exit('why')")
    assert (done.rc, done.out, done.err) == (1, "said\n", "why\n")
    with pytest.raises(AssertionError, match="why"):
        done.check()


def test_run_python_kills_the_process_group_on_timeout(run_python, tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(pytest.fail.Exception, match="killed after"):
        run_python(code, timeout_s=2)
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.1)


class Item:
    """A test with marks, as far as tests/conftest.py looks at one."""

    def __init__(self, folder, *marks):
        self.path, self.marks = Path("tests", folder, "test_it.py"), [getattr(pytest.mark, name) for name in marks]

    def get_closest_marker(self, name):
        return next((mark for mark in self.marks if mark.name == name), None)

    def add_marker(self, mark):
        self.marks.append(getattr(pytest.mark, mark) if isinstance(mark, str) else mark)

    def why_skipped(self):
        return [mark.kwargs["reason"] for mark in self.marks if mark.name == "skip"]


@pytest.mark.parametrize(("options", "full", "upstream"), [
    ({}, ["full test: runs with --full"], ["needs upstream sources: runs with --upstream DIR"]),
    ({"--full": True}, [], ["needs upstream sources: runs with --upstream DIR"]),
    ({"--full": True, "--upstream": Path("up")}, [], []),
])  # fmt: skip
def test_full_and_upstream_tests_say_why_they_are_skipped(options, full, upstream):
    items = [Item("comm", "full"), Item("comm", "upstream"), Item("loop")]
    conftest.pytest_collection_modifyitems(SimpleNamespace(getoption=options.get), items)
    assert [item.path.parent.name for item in items] == ["loop", "comm", "comm"]  # the longest first
    assert [item.why_skipped() for item in items] == [[], full, upstream]
    assert [item.get_closest_marker("slow") is not None for item in items] == [False, True, False]
    assert conftest.pytest_collection_modifyitems.pytest_impl["tryfirst"]  # else -m "not slow" keeps the full tests
