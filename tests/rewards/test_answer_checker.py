"""The helper process that compares answers: start, end, and what happens when it is lost or cannot start."""

import signal
import time

import psutil
import pytest

from tests.ranks import HANG_S
from verl_patches.errors import ConfigError
from verl_patches.rewards.answer_checker import MEMORY_BYTES, AnswerChecker

pytestmark = pytest.mark.slow  # each starts processes


class Checker(AnswerChecker):
    """With a time limit that no comparison reaches on a busy machine."""

    def equivalent(self, gold, answer, cpu_limit_s=60.0):
        return super().equivalent(gold, answer, cpu_limit_s)


@pytest.fixture
def checker():
    checker = Checker()
    yield checker
    checker.close()


def wait_until_gone(pid):
    deadline = time.monotonic() + HANG_S
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_one_helper_compares_all_answers_until_close_ends_it(checker):
    assert checker.equivalent("1/2", "0.5")
    helper = psutil.Process(checker.pid)
    assert checker.equivalent("1/2", "0.50") and checker.pid == helper.pid
    checker.close()
    assert checker.pid is None and not helper.is_running()


def test_a_helper_that_ends_during_a_comparison_is_replaced_once(checker, monkeypatch, caplog):
    ended = []

    def request_of_ending_helper(process, request, original=AnswerChecker._request):
        if len(ended) < limit:
            ended.append(process.pid)
            process.kill()
            process.wait()
        return original(process, request)

    monkeypatch.setattr(AnswerChecker, "_request", staticmethod(request_of_ending_helper))
    limit = 1
    assert checker.equivalent("1/2", "0.5")
    limit = 3
    assert not checker.equivalent("1/2", "0.5")
    assert "ended twice (last: -9)" in caplog.text and len(set(ended)) == 3


def test_a_caller_that_is_interrupted_leaves_no_reply_for_the_next_one(checker, monkeypatch):
    def interrupted(process, request):
        process.stdin.write(request)
        process.stdin.flush()
        raise KeyboardInterrupt

    assert checker.equivalent("1/2", "0.5")
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checker, "_request", interrupted)
        checker.equivalent("1", "2")
    assert checker.equivalent("1/2", "0.5")


def test_time_limits_do_not_depend_on_the_callers_signals(checker):
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    try:
        assert checker.equivalent("1", r"\binom{90000}{45000}", cpu_limit_s=0.02) is False
    finally:
        signal.signal(signal.SIGPROF, before)


@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_the_helper_ends_with_the_process_that_started_it(run_python, ending):
    code = (
        "import os\nfrom verl_patches.rewards.answer_checker import AnswerChecker\nchecker = AnswerChecker()\n"
        f"assert checker.equivalent('1', '2/2', 60.0)\nprint(checker.pid, flush=True)\n{ending}\n"
    )
    wait_until_gone(int(run_python(code).out))


def test_a_process_has_one_helper_and_its_fork_another(run_python):
    code = """
import os
from verl_patches.rewards.answer_checker import shared_answer_checker
assert shared_answer_checker().equivalent("1", "2/2", 60.0)
first = shared_answer_checker().pid
child = os.fork()
if child == 0:
    good = shared_answer_checker().equivalent("1", "3/3", 60.0) and shared_answer_checker().pid != first
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0
assert shared_answer_checker().equivalent("1", "4/4", 60.0) and shared_answer_checker().pid == first
"""
    run_python(code).check()


def test_without_math_verify_the_error_says_what_to_install(tmp_path, monkeypatch, checker):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no math-verify here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="math-verify"):
        checker.equivalent("1", "2/2")


ALLOCATES = """
import sympy
def parse(answer, *args, **options):
    digits = answer.strip("$")
    bytearray(int(digits) if digits.isdigit() else 0)
    return [sympy.Integer(1)]
class LatexExtractionConfig:
    def __init__(self, **options): pass
"""


def test_an_answer_that_needs_more_memory_than_the_limit_is_wrong(tmp_path, monkeypatch, checker):
    """math-verify is replaced by a parser that allocates as many bytes as the answer says, and reads 1."""
    (tmp_path / "math_verify.py").write_text(ALLOCATES)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert checker.equivalent("1", str(MEMORY_BYTES // 2))
    first = checker.pid
    assert not checker.equivalent("1", str(2 * MEMORY_BYTES))
    assert checker.equivalent("1", str(MEMORY_BYTES // 2)) and checker.pid == first
