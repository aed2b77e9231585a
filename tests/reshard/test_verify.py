"""What verification sees by the data itself, after a sync that ran through."""

from __future__ import annotations

import pytest
import torch

from tests.reshard import spoilt
from tests.reshard.cases import TINY, Case
from verl_patches.layout.parallel import parse_layout, rollout_layout
from verl_patches.reshard.region import Region
from verl_patches.reshard.verify import checksum, count_nan

PLAIN = Case(TINY, parse_layout("tp2 pp2 ep2 etp1 @4 layers=1,2"), rollout_layout(1, dp=2, tp=2), bucket_bytes=1 << 11)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("nothing", "fine"),
        ("left out", "NaN"),
        ("transposed", "rank 2 (model.layers."),
        ("swapped", "2 of 119 regions"),
        ("last value", "rank 2 (model.embed_tokens.weight) checksum"),
        ("replicas differ", "(training) checksum"),
    ],
)
def test_wrong_bytes_are_named_on_every_rank(ranks4, spoil, said):
    messages = ranks4.run(spoilt.with_wrong_bytes, PLAIN, spoil)
    assert len(set(messages)) == 1
    assert said in messages[0]
    assert spoil == "nothing" or "as on training rank" in messages[0]


def test_not_a_number_in_training_is_no_fault_of_the_sync(ranks4):
    assert ranks4.run(spoilt.with_nan, PLAIN) == [("fine", 1)] * 4


@pytest.mark.parametrize("spoil", ["nothing", "transposed", "exchanged"])
def test_a_wrong_map_is_found_by_loading_again(ranks4, spoil):
    for rank, found in enumerate(ranks4.run(spoilt.with_wrong_map, PLAIN, spoil)):
        names = [text.split(" on rank ")[0] for text in found]
        assert names == ([] if spoil == "nothing" else ["model.layers.1.mlp.experts.down_proj.weight"])
        assert all(f"on rank {rank}: expected to stay" in text for text in found)


def test_a_checksum_adds_up_from_parts_and_knows_places():
    whole = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    all_of_it = checksum(whole, Region("w", 0, 0, 6), whole.shape)
    for axis in (0, 1):
        parts = [(whole.narrow(axis, a, b - a), Region("w", axis, a, b)) for a, b in ((0, 2), (2, 6))]
        assert sum(checksum(values, region, whole.shape) for values, region in parts) == all_of_it
    assert checksum(whole.t().contiguous().t(), Region("w", 0, 0, 6), whole.shape) == all_of_it  # strides do not count
    assert checksum(whole.t(), Region("w", 0, 0, 6), whole.shape) != all_of_it
    assert checksum(whole.flip(0), Region("w", 0, 0, 6), whole.shape) != all_of_it
    changed = whole.clone()
    changed[5, 5] = -changed[5, 5]
    assert checksum(changed, Region("w", 0, 0, 6), whole.shape) != all_of_it


def test_checksum_of_large_tensors_goes_by_pieces(monkeypatch):
    whole = torch.arange(50, dtype=torch.float32).view(10, 5)
    at_once = checksum(whole, Region("w", 0, 0, 10), whole.shape)
    monkeypatch.setattr("verl_patches.reshard.verify._CHUNK", 12)
    assert checksum(whole, Region("w", 0, 0, 10), whole.shape) == at_once
    assert count_nan(torch.tensor([1.0, float("nan")])) == 1
    assert count_nan(torch.tensor([1, 2])) == 0
