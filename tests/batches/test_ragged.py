"""Ragged tensors, their padded form, and the batch that verl would make of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_patches.batches.exchange import Ragged, from_padded, mask_of, model_inputs, prompt_inputs, to_padded


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


@pytest.mark.slow
def test_model_inputs_are_those_of_verl():
    """As vllm_rollout_spmd.py puts them together, by verl's own functions."""
    from verl.utils.model import compute_position_id_with_mask
    from verl.utils.torch_functional import get_response_mask

    pad, end, prompt_width, width = 7, 2, 5, 6
    prompts = to_padded(Ragged(torch.tensor([11, 12, 13, 14]), (1, 3)), prompt_width, pad=pad, left=True)
    responses = torch.tensor([[21, 22, end, pad, pad, pad], [31, 32, 33, 34, 35, 36]])
    prompt_mask = mask_of([1, 3], prompt_width, left=True).long()
    mask = torch.cat([prompt_mask, get_response_mask(responses, end, torch.int64)], 1)
    prompt_places = compute_position_id_with_mask(prompt_mask)
    places = torch.cat([prompt_places, prompt_places[:, -1:] + torch.arange(1, width + 1)], 1)
    of_prompts = from_padded(prompts, prompt_mask, left=True, dtype=torch.int32)
    of_responses = from_padded(responses, mask[:, prompt_width:], dtype=torch.int32)
    expected = {"input_ids": prompts, "attention_mask": prompt_mask, "position_ids": prompt_places}
    assert_equal(prompt_inputs(of_prompts, prompt_width, pad), expected)
    ids = torch.cat([prompts, responses], 1)
    expected = {"prompts": prompts, "responses": responses, "input_ids": ids}
    expected |= {"attention_mask": mask, "position_ids": places}
    assert_equal(model_inputs(of_prompts, of_responses, prompt_width, width, pad), expected)


def assert_equal(tensors, expected):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor) and tensors[name].dtype == torch.int64, name
