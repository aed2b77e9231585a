"""Pools of gloo ranks that all tests of this folder share."""

import pytest

from tests.reshard.pool import Pool


@pytest.fixture(scope="session")
def pool4():
    """Four ranks."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool8():
    """Eight ranks."""
    pool = Pool(8)
    yield pool
    pool.close()
