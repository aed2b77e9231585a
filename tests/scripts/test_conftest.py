"""The fixtures that all tests lean on: a fresh process with known switches, killed as a whole when it hangs."""

import time

import psutil
import pytest


def test_run_python_sets_only_the_switches_it_is_given(run_python, monkeypatch):
    monkeypatch.setenv("VERL_PATCHES", "line=a3")
    show = "import os, sys, verl_patches; print(os.environ.get('VERL_PATCHES'), sys.argv[1:])"
    assert run_python(show, "x").check().out == "None ['x']\n"
    assert run_python(show, patches="line=pypi,platform=cpu").out.startswith("line=pypi,platform=cpu ")


def test_run_python_kills_the_process_group_on_timeout(run_python, tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'new')!r}, 'w').write(str(child.pid))\n"
        f"import os; os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'pid')!r})\n"
        "time.sleep(600)\n"
    )
    for limit in (2, 20, 200):  # on a busy machine the child may not run yet when the first one ends
        with pytest.raises(pytest.fail.Exception, match="killed after"):
            run_python(code, timeout_s=limit)
        if (tmp_path / "pid").is_file():
            break
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.1)
