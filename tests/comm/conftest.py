"""A pool of gloo ranks that the tests of this folder share."""

import pytest

from tests.reshard.pool import Pool


@pytest.fixture(scope="session")
def ranks():
    """Four ranks."""
    pool = Pool(4)
    yield pool
    pool.close()
