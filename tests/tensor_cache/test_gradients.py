"""Balanced micro batches leave the gradients of a mini batch as they are; see gradient_job.py for what is computed."""

import pytest

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.fixture(scope="module")
def difference(run_ranks):
    """{case: relative difference to the gradients of arrival order}."""
    return run_ranks("tests.tensor_cache.gradient_job:differences")[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_arrival_order(difference, mode, size):
    assert difference[f"{mode} {size}"] < 1e-13


@pytest.mark.slow
def test_token_mean_needs_its_micro_batches_whole(difference):
    assert difference["token-mean 4 torn"] > 1e-3
    assert difference["token-mean 1 torn"] < 1e-13


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_with_a_token_budget_the_weights_are_of_the_packing(difference, mode):
    assert difference[f"{mode} 1 packed"] > 1e-3
