"""A build sets HF_HOME for the rest of its process, which is that of all tests."""

import pytest


@pytest.fixture(autouse=True)
def hub_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hub"))
