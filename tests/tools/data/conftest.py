"""Isolate HF_HOME in each test: a build sets it for the rest of the process, which all tests share."""

import pytest


@pytest.fixture(autouse=True)
def hub_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "hub"))
