"""A small upstream repository and a folder for trees, for the tests of fetch-upstream."""

import pytest

from tests.cluster.small_upstream import Upstream
from verl_patches.cluster import fetch as fetch_module


@pytest.fixture
def upstream(tmp_path):
    folder = tmp_path / "remote"
    folder.mkdir()
    return Upstream(folder)


@pytest.fixture
def dest(tmp_path, monkeypatch):
    """Where trees go; the catalogue has nothing to say about the small repositories."""
    monkeypatch.setattr(fetch_module, "_check_report", lambda line, dest: {"state": "empty", "rows": [], "counts": {}})
    return tmp_path / "dest"
