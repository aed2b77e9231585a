"""Test the tensor cache: samples in any order, and no tensor outlives its step."""

import gc
import weakref

import pytest
import torch

from verl_patches.errors import RecipeError
from verl_patches.step.batches.cache import TensorCache
from verl_patches.step.batches.exchange import RaggedTensor


def ragged(*samples):
    return RaggedTensor(
        torch.tensor([v for sample in samples for v in sample], dtype=torch.int32), tuple(map(len, samples))
    )


@pytest.fixture
def cache():
    """Make a cache with responses of samples 7, 3 and 5."""
    cache = TensorCache()
    cache.put("responses", [7, 3, 5], ragged([70, 71], [], [50]))
    return cache


def test_samples_come_in_the_requested_order(cache):
    def values(*samples):
        return [part.tolist() for part in cache.get("responses", samples).parts()]

    assert values(5, 7) == [[50], [70, 71]] and values(3) == [[]] and cache.bytes_held == 12
    first, second = (cache.get("responses", [7, 3, 5]).values for _ in range(2))
    assert first.data_ptr() == second.data_ptr()  # the values are not copied


def test_a_step_leaves_nothing(cache):
    memory = weakref.ref(cache.get("responses", [7, 3, 5]).values)
    cache.close()
    cache.close()
    gc.collect()
    assert (cache.names, cache.bytes_held, memory()) == ((), 0, None)  # nothing else holds the memory
    words = r"1 samples have no responses \(the first is sample 7\); the cache has no tensors"
    with pytest.raises(RecipeError, match=words):
        cache.get("responses", [7])
