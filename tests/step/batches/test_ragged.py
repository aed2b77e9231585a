"""Test ragged tensors and their padded form; test_cached_step.py and tests/loop test the batch made of them."""

import pytest
import torch

from verl_patches.step.batches.exchange import RaggedTensor, from_padded, to_padded, value_mask


@pytest.mark.parametrize("left", [False, True])
def test_padding_and_back(left):
    ragged = RaggedTensor(torch.arange(1, 6, dtype=torch.int32), (3, 0, 2))
    padded, mask = to_padded(ragged, 4, pad=-1, left=left, dtype=torch.int64), value_mask(ragged.lengths, 4, left=left)
    assert torch.equal(padded == -1, ~mask)
    back = from_padded(padded, mask.long(), left=left, dtype=torch.int32)
    assert back.lengths == ragged.lengths and back.values.dtype == torch.int32
    assert torch.equal(back.values, ragged.values)


def test_a_mask_with_a_gap_is_refused():
    with pytest.raises(ValueError, match="not one block at its beginning"):
        from_padded(torch.zeros(1, 3), torch.tensor([[1, 0, 1]]))
