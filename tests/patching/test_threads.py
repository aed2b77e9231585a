"""Many threads at once, in a process that a deadlock ends: see threads_world.py."""

from pathlib import Path

import pytest

WORLD = Path(__file__).with_name("threads_world.py")


@pytest.fixture
def play(run_python, tmp_path):
    def run(world):
        code = f"import runpy, sys; sys.argv[0] = {str(WORLD)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
        return run_python(code, str(tmp_path), world, timeout_s=90)

    return run


def test_everything_at_once(play):
    play("storm").check()


def test_a_hook_and_an_apply_that_want_each_others_lock(play):
    play("crossed").check()


@pytest.mark.slow
def test_installing_under_the_lock_would_hang(play):
    found = play("crossed-naive")
    assert found.rc != 0 and "Timeout" in found.err and "in _install" in found.err


def test_an_import_that_began_before_apply_is_patched(play):
    play("late").check()


def test_without_waiting_for_a_running_import_it_would_be_missed(play):
    found = play("late-naive")
    assert found.rc != 0 and "t.f is waiting" in found.err and "imported past our hook" in found.err
