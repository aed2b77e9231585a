"""The fixtures that all tests lean on: a fresh process with known switches, killed as a whole when it hangs."""

import os
import time

import pytest


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


def test_run_python_kills_the_whole_group_on_timeout(run_python, tmp_path):
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    with pytest.raises(pytest.fail.Exception, match="killed after"):
        run_python(code, timeout_s=2)
    pid = int((tmp_path / "pid").read_text())
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        with open(f"/proc/{pid}/stat") as stat:  # dead, and only waiting for its adopter
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} outlived its test")


@pytest.mark.slow
def test_full_and_upstream_tests_say_why_they_are_skipped(pytester_like):
    out = pytester_like("")
    assert "runs with --full" in out and "runs with --upstream DIR" in out and "2 skipped" in out
    assert "1 passed, 1 skipped" in pytester_like("--full")
    assert "2 deselected" in pytester_like("-m", "not slow and not upstream")


@pytest.fixture
def pytester_like(run_python, tmp_path, pytestconfig):
    """Run pytest on two marked tests under this repository's own conftest."""
    (tmp_path / "conftest.py").write_text((pytestconfig.rootpath / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(
        "import pytest\n\n@pytest.mark.full\ndef test_a(): pass\n\n@pytest.mark.upstream\ndef test_b(): pass\n"
    )

    def run(*args: str) -> str:
        config = str(pytestconfig.rootpath / "pyproject.toml")
        words = ["-c", config, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path), *filter(None, args)]
        return run_python("import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))", *words).out

    return run
