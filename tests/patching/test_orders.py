"""Test every order of import, apply, revert, verify and healing, on every kind of target: see orders_world.py."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # each starts processes, or plans 256 ranks

WORLD = Path(__file__).with_name("orders_world.py")


@pytest.fixture
def play(play_world):
    """Return play(world, length, *spoilt) -> {"sequences": n, "faults": [...]}."""
    return lambda *arguments: json.loads(play_world(WORLD, *arguments).check().out)


@pytest.mark.parametrize(
    ("world", "length", "least"),
    [
        *((world, 3, 180) for world in ("body", "inside-healthy", "inside-body")),
        *((world, 4, 600) for world in ("healthy", "provider", "inside-provider")),
    ],
)
def test_all_orders_of_steps(play, world, length, least):
    found = play(world, length)
    assert found["sequences"] > least and found["faults"] == []


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
