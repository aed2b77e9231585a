"""Test the comparison with the public recipe: what differs has a reason, and what is called a gain is one."""

from dataclasses import replace

import public_recipe
import pytest
from public_recipe import SETTINGS, comparison, gains


def unexplained(settings):
    """Return the names of settings without a reason although ours differs, or although we have no key."""
    known = {setting.name: ours for setting, ours in comparison()}
    return [each.name for each in settings if known[each.name] != each.values and not each.note]


def test_each_difference_from_the_public_recipe_has_a_reason():
    assert unexplained(SETTINGS) == []
    without = [replace(each, note="") for each in SETTINGS]
    assert {"HCCL_CONNECT_TIMEOUT", "MASTER_ADDR", "rollout.enable_chunked_prefill"} <= {*unexplained(without)}


def test_a_changed_level_is_found(monkeypatch):
    compose = public_recipe.compose
    other = "recipe.rollout.ascend.prefix_caching=true"
    monkeypatch.setattr(public_recipe, "compose", lambda name, given, rows: compose(name, [*given, other], rows))
    assert unexplained(SETTINGS) == ["enable_prefix_caching"]


def test_each_part_of_level_tuned_is_modelled_to_gain():
    found = {gain.what: saved for gain, saved in gains() if saved is not None}
    assert min(found.values()) >= 0 and max(found.values()) == found["micro batches of equal lengths"] > 100
    assert found["one all-reduce less in a decode step"] == pytest.approx(3072 * 0.003, rel=0.01)
