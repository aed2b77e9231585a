"""Ragged tensors and their padded form; the batch made of them: test_cached_step.py and tests/loop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_patches.batches.exchange import Ragged, from_padded, mask_of, to_padded


@given(st.lists(st.integers(0, 6), min_size=1, max_size=6), st.booleans(), st.integers(0, 3))
def test_padding_and_back(lengths, left, room):
    ragged = Ragged(torch.arange(1, sum(lengths) + 1, dtype=torch.int32), tuple(lengths))
    padded = to_padded(ragged, max(lengths) + room, pad=-1, left=left, dtype=torch.int64)
    mask = mask_of(lengths, max(lengths) + room, left=left)
    assert torch.equal(padded == -1, ~mask)
    back = from_padded(padded, mask.long(), left=left, dtype=torch.int32)
    assert back.lengths == ragged.lengths and back.values.dtype == torch.int32
    assert torch.equal(back.values, ragged.values)
    last = ragged.take([len(lengths) - 1])
    assert last.values.tolist() == ragged.parts()[-1].tolist() and ragged.take([]).lengths == ()


@pytest.mark.parametrize(("call", "says"), [
    (lambda: Ragged(torch.zeros(3), (1, 1)), r"expected \[2\]"),
    (lambda: to_padded(Ragged(torch.zeros(3), (3,)), 2), "the longest sample has 3 values, expected 2"),
    (lambda: from_padded(torch.zeros(1, 3), torch.tensor([[1, 0, 1]])), "not one block that begins it"),
    (lambda: from_padded(torch.zeros(1, 2), torch.tensor([[1, 0]]), left=True), "not one block that ends it"),
])  # fmt: skip
def test_tensors_that_are_not_ragged_are_refused(call, says):
    with pytest.raises(ValueError, match=says):
        call()
