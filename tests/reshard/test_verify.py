"""Test the checksum of a region; test_execute.py tests the verification of syncs."""

from __future__ import annotations

import torch

from verl_patches.reshard.region import Region
from verl_patches.reshard.verify import checksum


def test_a_checksum_adds_up_from_parts_and_depends_on_places():
    whole = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = Region("w", 0, 0, 6)
    expected = checksum(whole, rows, whole.shape)
    for axis in (0, 1):
        parts = [(whole.narrow(axis, a, b - a), Region("w", axis, a, b)) for a, b in ((0, 2), (2, 6))]
        assert sum(checksum(values, region, whole.shape) for values, region in parts) == expected
    assert checksum(whole.t().contiguous().t(), rows, whole.shape) == expected  # strides do not count
    changed = whole.clone()
    changed[5, 5] = -changed[5, 5]
    for other in (whole.t(), whole.flip(0), changed):
        assert checksum(other, rows, whole.shape) != expected


def test_checksum_of_large_tensors_goes_by_pieces(monkeypatch):
    whole = torch.arange(50, dtype=torch.float32).view(10, 5)
    at_once = checksum(whole, Region("w", 0, 0, 10), whole.shape)
    monkeypatch.setattr("verl_patches.reshard.verify._CHUNK_ELEMENTS", 12)
    assert checksum(whole, Region("w", 0, 0, 10), whole.shape) == at_once
