"""A small upstream repository and a folder for its clones."""

import pytest

from tests.upstream.small_upstream import Upstream


@pytest.fixture
def upstream(tmp_path):
    folder = tmp_path / "remote"
    folder.mkdir()
    return Upstream(folder)


@pytest.fixture
def dest(tmp_path):
    """Where clones go."""
    return tmp_path / "dest"
