"""Skip fsync in these tests, because disks are slow; test_files_are_durable_before_they_have_their_names calls it."""

import os

import pytest


@pytest.fixture(autouse=True)
def without_fsync(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)
