"""Balanced micro batches do not change the gradients of a mini batch; see gradient_job.py."""

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def differences(run_ranks):
    return run_ranks("tests.batches.gradient_job:differences")[0]


def test_gradients_of_the_plan_are_those_of_arrival_order(differences):
    planned = {case: found["planned"] for case, found in differences.items()}
    assert len(planned) == 8 and max(planned.values()) < 1e-13, planned


def test_token_mean_needs_the_micro_batches_of_arrival_order(differences):
    """Negative control; with a token budget the weights always depend on the packing."""
    assert differences["token-mean 4"]["balanced"] > 1e-3 and differences["token-mean 1"]["balanced"] < 1e-13
    assert all(found["packed"] > 1e-3 for found in differences.values())
