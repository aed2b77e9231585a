"""fsync is left out in these tests (test_files_are_durable_before_they_have_their_names calls it): disks are slow."""

import os

import pytest


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
