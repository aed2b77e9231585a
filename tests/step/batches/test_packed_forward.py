"""Test the parts of context-parallel ranks; tests/model/test_mindspeed_batches.py has a model's updates with them."""

import pytest
import torch

from tests.step.batches import parts_job


@pytest.mark.slow
def test_parts_of_unequal_sequences_divide_over_tensor_parallel_ranks_too(ranks4):
    """Pad sequences of 3 and 2 tokens to 4 each, for TP 2 x CP 2: with 4 and 2 a part would have 3."""
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
    found = ranks4.run(parts_job.cut, mask)
    assert [part for part, _, _ in found] == [[[2, 3, 4, 0]]] * 2 + [[[5, 6, 0, 0]]] * 2  # CP ranks 0, 0, 1, 1
    assert all(whole == [[0, 2, 3, 4], [5, 6, 0, 0]] for _, whole, _ in found)
    # each rank has the whole loss, and Megatron averages over CP ranks
    assert [gradient for _, _, gradient in found] == [[[2, 2, 2, 0]]] * 2 + [[[2, 2, 0, 0]]] * 2
