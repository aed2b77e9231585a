"""Test the helper process: its start, its limits, its end, its loss, and a failed start."""

import os
import signal
import time
from fractions import Fraction

import psutil
import pytest

from tests.ranks import HANG_S
from verl_patches.errors import ConfigError, traceback_location
from verl_patches.rewards.helper_process import MEMORY_BYTES, CallError, HelperProcess

NO_LIMIT_S = 60.0  # longer than any call below takes, even on a busy machine


@pytest.fixture
def helper():
    helper = HelperProcess("builtins:eval", trial=("True",))
    yield helper
    if helper._process:
        helper._process.kill()
        helper._process.communicate()


def helper_pid(helper):
    return helper.call("__import__('os').getpid()", cpu_limit_s=NO_LIMIT_S)


def test_one_process_makes_all_calls_and_hands_errors_on(helper):
    first = helper_pid(helper)
    assert helper.call("print('no reply') or [1 + 1]", cpu_limit_s=NO_LIMIT_S) == [2]
    with pytest.raises(CallError, match="ZeroDivisionError"):
        helper.call("1 / 0", cpu_limit_s=NO_LIMIT_S)
    assert helper_pid(helper) == first != os.getpid()


@pytest.mark.parametrize("call", ["10**10**10", "__import__('time').sleep(10**6)"])
def test_a_function_that_never_returns_is_ended_at_its_limit(helper, call):
    """Run one function that needs the limit of CPU time to end, and one that needs the limit of wall-clock time."""
    first = helper_pid(helper)
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)  # the limits do not depend on the caller's signals
    try:
        with pytest.raises(CallError, match="0.1 s of CPU time"):
            helper.call(call, cpu_limit_s=0.1)
    finally:
        signal.signal(signal.SIGPROF, before)
    assert helper_pid(helper) != first


def test_a_call_that_needs_more_memory_than_the_limit_fails(helper):
    first = helper_pid(helper)
    assert helper.call(f"len(bytearray({MEMORY_BYTES // 2}))", cpu_limit_s=NO_LIMIT_S) == MEMORY_BYTES // 2
    with pytest.raises(CallError, match="MemoryError"):
        helper.call(f"len(bytearray({2 * MEMORY_BYTES}))", cpu_limit_s=NO_LIMIT_S)
    assert helper_pid(helper) == first


def test_a_process_that_dies_is_replaced_once(helper):
    os.kill(helper_pid(helper), signal.SIGKILL)
    assert helper.call("1 + 1", cpu_limit_s=NO_LIMIT_S) == 2
    with pytest.raises(CallError, match="ended twice, the last time with exit code 7"):
        helper.call("__import__('os')._exit(7)", cpu_limit_s=NO_LIMIT_S)
    assert helper.call("1 + 1", cpu_limit_s=NO_LIMIT_S) == 2


def test_a_function_of_a_users_file_takes_and_gives_any_object_and_its_error_names_its_line(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "import os\n\ndef score(row):\n    os.system('echo no reply')\n    return {1: row['x']}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = HelperProcess("own:score", trial=({"x": True},))
    assert helper.call({"x": Fraction(1, 3)}, cpu_limit_s=NO_LIMIT_S) == {1: Fraction(1, 3)}
    with pytest.raises(CallError, match="KeyError: 'x'") as raised:
        helper.call({}, cpu_limit_s=NO_LIMIT_S)
    assert traceback_location(str(raised.value.__cause__), str(tmp_path / "own.py")).endswith("own.py:5: ")


def test_a_caller_that_is_interrupted_leaves_no_reply_for_the_next_one(helper):
    def interrupt(*_):
        raise InterruptedError

    helper_pid(helper)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(InterruptedError):
            helper.call("__import__('time').sleep(1)", cpu_limit_s=NO_LIMIT_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert helper.call("1 + 1", cpu_limit_s=NO_LIMIT_S) == 2


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_the_helper_ends_with_the_process_that_started_it(run_python, ending):
    code = (
        "import os\nfrom verl_patches.rewards.helper_process import HelperProcess\n"
        "helper = HelperProcess('builtins:eval', ('True',))\n"
        f"print(helper.call('__import__(\"os\").getpid()', cpu_limit_s=60.0), flush=True)\n{ending}\n"
    )
    pid, deadline = int(run_python(code).out), time.monotonic() + HANG_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


@pytest.mark.slow
def test_a_process_has_one_helper_and_its_fork_another(run_python):
    code = """
import os
from verl_patches.rewards.maths import _process_helper, compute_score
assert compute_score("d", r"\\boxed{2/2}", "1", cpu_limit_s=60.0)["acc"]
first = _process_helper(os.getpid())._process.pid
child = os.fork()
if child == 0:
    good = compute_score("d", r"\\boxed{3/3}", "1", cpu_limit_s=60.0)["acc"]
    os._exit(0 if good and _process_helper(os.getpid())._process.pid != first else 1)
assert os.waitpid(child, 0)[1] == 0
assert compute_score("d", r"\\boxed{4/4}", "1", cpu_limit_s=60.0)["acc"]
assert _process_helper(os.getpid())._process.pid == first
"""
    run_python(code).check()


def test_a_helper_that_cannot_start_says_why_and_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math-verify here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    helper = HelperProcess("verl_patches.rewards.equivalence:equivalent", trial=("1", "2/2"))
    with pytest.raises(ConfigError, match=r"no math-verify here.*requirements\.txt"):
        helper.call("1", "2/2", cpu_limit_s=NO_LIMIT_S)
