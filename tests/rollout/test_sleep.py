"""Sleep and wake of the engine that verl builds, by row memory.sleep_mode in place of vLLM's sleep mode."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tiny_model, run_rollout) -> dict:
    return run_rollout("sleep_rank:cycles", tiny_model, {"tensor_model_parallel_size": 1})[0]


def test_fifty_cycles_leave_nothing_behind_and_give_the_same_tokens(found):
    assert found["sleep_mode"] is False
    assert len(found["tokens"]) == 7 and all(tokens == found["tokens"][0] for tokens in found["tokens"])
    assert len(found["bytes"]) == 6 and len(set(found["bytes"])) == len(found["blocks"]) == 1
    now, copies = found["leak"]  # negative control: a copy of the weights is held
    assert now == found["bytes"][0] + copies and copies
    warm, *later = found["rss"]  # below no tensor: 4 KB in 40 cycles; weights lost in each were 40 copies
    assert len(later) == 4 and max(later) - warm < 10 * copies


def test_asleep_neither_weights_nor_cache_have_memory(found):
    rest, held = found["asleep"]
    assert held == 0 and rest < found["bytes"][0]
    layers, nonzero = found["cache"]
    assert layers and nonzero == 0


def test_weights_that_no_sync_has_filled_are_refused(found):
    assert "weights were freed by sleep" in found["not_filled"] and "sharding manager" in found["not_filled"]
    assert "1 unfinished requests" in found["unfinished"]
    assert "are asleep" in found["while_asleep"] and "wake_up" in found["while_asleep"]


def test_absorbed_projections_must_be_derived_again(found):
    assert found["other"] != found["tokens"][0]
    assert found["not_derived"] not in (found["other"], found["tokens"][0])
