"""vLLM's sleep mode of engines with captured graphs, without the copy of what the weight sync writes."""

from types import SimpleNamespace

import pytest

from verl_patches.errors import RecipeError
from verl_patches.memory import sleep_mode
from verl_patches.memory.sleep_mode import dropped, segments_of

SEGMENT = 4096


def segment(address, *blocks):
    return {"address": address, "blocks": [{"address": at, "state": state} for at, state in blocks]}


def test_a_segment_goes_only_if_nothing_else_lives_in_it():
    lives, free, waits = "active_allocated", "inactive", "active_pending_free"
    snapshot = [segment(0, (0, lives), (8, lives), (9, free)), segment(16, (16, lives), (24, lives)),
                segment(32, (32, lives), (40, waits)), segment(48, (48, free)), segment(64, (64, waits))]
    assert segments_of(snapshot, {0, 8, 16, 32}) == {0, 48}
    assert segments_of(snapshot, {0, 8, 16, 24, 32, 40, 64}) == {0, 16, 32, 48, 64}


def test_what_another_tag_holds_is_left_and_tags_come_back_after_an_error():
    pieces = {0: SimpleNamespace(tag="weights"), 8: SimpleNamespace(tag="kv_cache"), 16: SimpleNamespace(tag="weights")}
    with pytest.raises(RuntimeError, match="no more"), dropped(pieces, {0, 8}):
        assert [each.tag == "weights" for each in pieces.values()] == [False, False, True]
        assert pieces[8].tag == "kv_cache"
        raise RuntimeError("no more")
    assert [each.tag for each in pieces.values()] == ["weights", "kv_cache", "weights"]


def test_a_sleep_mode_that_is_not_known_here_is_refused(monkeypatch):
    monkeypatch.setattr(sleep_mode, "_ALLOCATORS", (("no.such.module", "CaMemAllocator"),))
    with pytest.raises(RecipeError, match="CaMemAllocator of vLLM's sleep mode, found neither: .*rollout_life"):
        sleep_mode._allocator()


@pytest.fixture(scope="module", params=["vllm", pytest.param("vllm_ascend", marks=pytest.mark.upstream)])
def found(request, run_ranks, a3_sources):
    given = []
    if request.param == "vllm_ascend":
        given = [str(a3_sources("vllm-ascend")[0] / "vllm_ascend/device_allocator/camem.py")]
    return run_ranks("tests.memory.sleep_mode:sleeps", *given, backend=None)[0]


@pytest.mark.slow
def test_only_what_the_sync_does_not_write_is_copied(found):
    """Six segments of weights; in three something else lives: an expert map, a buffer, what waits for a stream."""
    assert found["weights"] == 6 * SEGMENT
    as_loaded, after_a_sync, after_the_last = found["bytes"]
    assert as_loaded == after_the_last == 6 * SEGMENT and after_a_sync == 3 * SEGMENT
    assert found["tags"] == [["kv_cache", "weights"]] * 3


@pytest.mark.slow
def test_contents_outlive_sleep_but_for_weights_that_the_next_sync_writes(found):
    gone = [True, False, True]
    assert found["kept"] == {
        "up": gone, "down": gone, "kv_b_proj": gone, "W_UV": gone, "gate": [True] * 3, "expert_map": [True] * 3,
        "table": [True] * 3, "shared": [True] * 3, "head": [True] * 3}


@pytest.mark.slow
def test_generating_asleep_or_without_a_sync_is_refused(found):
    asleep, half, as_loaded = found["refused"][:3]
    assert "kv_cache and weights of the engine are asleep" in asleep and "while kv_cache of" in half and not as_loaded
    assert "no weight sync has filled" in found["refused"][5] and not found["refused"][8]


@pytest.mark.slow
def test_asking_for_what_is_so_already_does_nothing_and_half_awake_is_woken_before_it_sleeps(found):
    """vLLM's executor sleeps and wakes as a whole: it would forget one of two tags, or all of a sleep."""
    both, half = "wake weights, kv_cache", ["wake weights", "wake kv_cache"]
    assert found["calls"] == ["sleep", *half, "sleep", *half, "sleep"] and both not in found["calls"]


@pytest.mark.slow
def test_after_an_error_inside_sleep_nobody_generates(found):
    """vllm-ascend asserts, memory unmapped, that what is in use has not grown."""
    assert "weights of the engine are asleep" in found["refused"][9]
