"""Every order of import, apply, revert, verify and healing, over rows on every kind of target: see orders_world.py."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts processes, or plans 256 ranks

WORLD = Path(__file__).with_name("orders_world.py")
WORLDS = ["healthy", "provider", "body", "inside-healthy", "inside-provider", "inside-body"]


@pytest.fixture
def play(run_python, tmp_path):
    """play(world, length, *spoilt) -> {"sequences": n, "faults": [...]}"""

    def run(*arguments):
        code = f"import runpy, sys; sys.argv[0] = {str(WORLD)!r}; runpy.run_path(sys.argv[0], run_name='__main__')"
        return json.loads(run_python(code, str(tmp_path), *map(str, arguments)).check().out)

    return run


@pytest.mark.parametrize("world", WORLDS)
def test_all_orders_of_three_steps(play, world):
    found = play(world, 3)
    assert found["sequences"] > 180 and found["faults"] == []


@pytest.mark.parametrize("world", ["healthy", "provider", "inside-provider"])
def test_all_orders_of_four_steps(play, world):
    found = play(world, 4)
    assert found["sequences"] > 600 and found["faults"] == []


@pytest.mark.parametrize(
    ("world", "what", "words"),
    [
        ("provider", "arms once", "apply import import: AssertionError: import raised None"),
        ("inside-body", "never arms", "import import: AssertionError: states {'t.f': 'waiting'"),
        ("healthy", "no rebinding", "'t.f': 'overridden'"),
        ("healthy", "lower row looks alone", "'t.f': 'overridden', 't.over_f': 'active'"),
        ("inside-healthy", "unwatched", "import raised"),
    ],
)
def test_a_broken_engine_is_seen(play, world, what, words):
    found = play(world, 3, what)
    assert found["faults"] and words in found["faults"][0], found["faults"][:2]
