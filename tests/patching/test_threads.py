"""Test many threads at once, in a process that a deadlock ends: see threads_world.py."""

from pathlib import Path

import pytest

WORLD = Path(__file__).with_name("threads_world.py")


@pytest.mark.parametrize("world", ["storm", "crossed", "late", "stored-original", "stored-lower"])
def test_imports_and_apply_in_many_threads(play_world, world):
    play_world(WORLD, world).check()


@pytest.mark.slow
def test_installing_under_the_lock_would_hang(play_world):
    done = play_world(WORLD, "crossed-naive")
    assert done.rc != 0 and "Timeout" in done.err and "in _install" in done.err


def test_without_waiting_for_a_running_import_it_would_be_missed(play_world):
    done = play_world(WORLD, "late-naive")
    assert done.rc != 0 and "t.f is waiting" in done.err and "imported without our hook" in done.err
