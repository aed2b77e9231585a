"""The tensor cache: samples in any order, and no tensor outlives its step."""

import gc
import logging
import weakref

import pytest
import torch

from verl_patches.step.batches.cache import CacheError, TensorCache
from verl_patches.step.batches.exchange import Ragged


def ragged(*samples):
    return Ragged(torch.tensor([v for sample in samples for v in sample], dtype=torch.int32), tuple(map(len, samples)))


@pytest.fixture
def cache():
    """A cache in step 1 with responses of samples 7, 3 and 5."""
    cache = TensorCache()
    cache.open(1)
    cache.put(1, "responses", [7, 3, 5], ragged([70, 71], [], [50]))
    return cache


def test_samples_come_in_the_requested_order(cache):
    def values(*samples):
        return [part.tolist() for part in cache.get(1, "responses", samples).parts()]

    assert values(5, 7) == [[50], [70, 71]] and values(3) == [[]] and cache.bytes_held == 12
    first, second = (cache.get(1, "responses", [7, 3, 5]).values for _ in range(2))
    assert first.data_ptr() == second.data_ptr()  # no copy


@pytest.mark.parametrize("ends_by", ["close", "error", "next step"])
def test_a_step_leaves_nothing(cache, ends_by, caplog):
    memory = weakref.ref(cache.get(1, "responses", [7, 3, 5]).values)
    with caplog.at_level(logging.WARNING):
        if ends_by == "close":
            with cache.closed_by_error():
                cache.get(1, "responses", [7])
            assert cache.close() == 12 and cache.close() == 0
        elif ends_by == "error":
            with pytest.raises(ZeroDivisionError), cache.closed_by_error():
                raise ZeroDivisionError
        cache.open(2)
    gc.collect()
    assert (cache.names, cache.bytes_held, memory()) == ((), 0, None)  # nothing else holds the memory
    warned = "step 2 begins but step 1 was not closed: dropping responses (12 bytes)" in caplog.text
    assert warned == (ends_by == "next step") and bool(caplog.text) == warned
    with pytest.raises(CacheError, match="expected step 1 to be open, but step 2 is open; it has nothing"):
        cache.get(1, "responses", [7])


@pytest.mark.parametrize(("call", "says"), [
    (lambda cache: cache.get(1, "ref_log_prob", [0]), "has no ref_log_prob of 1 samples, the first is 0; it has resp"),
    (lambda cache: cache.put(1, "x", [0], ragged([1], [2])), "x of 1 samples has 2 lengths"),
    (lambda cache: cache.put(2, "x", [0], ragged([1])), "expected step 2 to be open, but step 1 is open"),
])  # fmt: skip
def test_wrong_use_is_refused(cache, call, says):
    with pytest.raises(CacheError, match=says):
        call(cache)
