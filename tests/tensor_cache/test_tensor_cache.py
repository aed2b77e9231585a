import gc
import logging
import weakref

import pytest
import torch

from verl_patches.tensor_cache.cache import CacheError, TensorCache
from verl_patches.tensor_cache.exchange import Ragged


def ragged(*samples):
    return Ragged(torch.tensor([v for sample in samples for v in sample], dtype=torch.int32), tuple(map(len, samples)))


def values(found):
    return [part.tolist() for part in found.parts()]


def test_samples_come_in_the_order_asked_for():
    cache = TensorCache()
    cache.open(1)
    with cache.closed_by_error():
        cache.put(1, "responses", [7, 3, 5], ragged([70, 71], [], [50]))
        assert values(cache.get(1, "responses", [5, 7])) == [[50], [70, 71]]
        assert values(cache.get(1, "responses", [3])) == [[]]
        kept = cache.get(1, "responses", (7, 3, 5))
        assert kept.values.data_ptr() == cache.get(1, "responses", [7, 3, 5]).values.data_ptr()  # no copy
        assert cache.bytes_held == 12


def generate(cache, step, *, validate=False):
    """A stage as a worker runs it: validation leaves nothing."""
    if not validate:
        cache.open(step)
        with cache.closed_by_error():
            cache.put(step, "responses", [0, 1], ragged([1, 2], [3]))
            return weakref.ref(cache.get(step, "responses", [0, 1]).values)
    return None


def update(cache, step, fail=False):
    with cache.closed_by_error():
        cache.get(step, "responses", [0, 1])
        if fail:
            raise RuntimeError("out of memory")


def assert_empty(cache, kept):
    gc.collect()
    assert (cache.names, cache.bytes_held) == ((), 0)
    assert kept() is None  # nothing else holds the memory


def test_a_step_leaves_nothing():
    cache = TensorCache()
    kept = generate(cache, 1)
    assert kept() is not None
    update(cache, 1)
    assert cache.close() == 12
    assert_empty(cache, kept)


def test_a_failed_step_leaves_nothing():
    cache = TensorCache()
    kept = generate(cache, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        update(cache, 1, fail=True)
    assert_empty(cache, kept)
    with pytest.raises(CacheError, match="asked for step 1, but no step is open"):
        cache.get(1, "responses", [0])
    cache.open(2)
    with pytest.raises(ZeroDivisionError), cache.closed_by_error():
        cache.put(2, "responses", [0], ragged([1]))
        raise ZeroDivisionError
    assert cache.names == ()


def test_validation_leaves_nothing_and_takes_nothing():
    cache = TensorCache()
    assert generate(cache, 0, validate=True) is None
    assert cache.names == ()
    generate(cache, 1)
    generate(cache, 1, validate=True)  # between a step's stages
    update(cache, 1)


def test_critic_warm_up_leaves_nothing_to_the_next_step(caplog):
    cache = TensorCache()
    kept = generate(cache, 1)  # no update, no close
    with caplog.at_level(logging.WARNING):
        generate(cache, 2)
    gc.collect()
    assert kept() is None
    assert "step 2 begins but step 1 was not closed: dropping responses (12 bytes)" in caplog.text
    with pytest.raises(CacheError, match="asked for step 1, but step 2 is open; it keeps responses of 2 samples"):
        update(cache, 1)
    assert cache.names == ()


def test_opening_after_a_clean_end_says_nothing(caplog):
    cache = TensorCache()
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            generate(cache, step)
            cache.close()
            assert cache.close() == 0
    assert caplog.text == ""


@pytest.mark.parametrize(("call", "says"), [
    (lambda cache: cache.get(1, "ref_log_prob", [0]), "has no ref_log_prob of 1 samples, the first is 0; it keeps r"),
    (lambda cache: cache.get(1, "responses", [1, 9, 8]), "has no responses of 2 samples, the first is 9"),
    (lambda cache: cache.put(1, "x", [0], ragged([1], [2])), "x of 1 samples has 2 lengths"),
    (lambda cache: cache.put(1, "x", [4, 4], ragged([1], [2])), "a sample twice"),
    (lambda cache: cache.put(2, "x", [0], ragged([1])), "asked for step 2, but step 1 is open"),
])  # fmt: skip
def test_wrong_use_is_named(call, says):
    cache = TensorCache()
    generate(cache, 1)
    with pytest.raises(CacheError, match=says):
        call(cache)
