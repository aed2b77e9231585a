import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl_patches.tensor_cache.exchange import Ragged, from_padded, mask_of, model_inputs, prompt_inputs, to_padded

LENGTHS = st.lists(st.integers(0, 6), min_size=1, max_size=6)


@given(LENGTHS, st.booleans(), st.integers(0, 3))
def test_padding_and_back(lengths, left, room):
    ragged = Ragged(torch.arange(1, sum(lengths) + 1, dtype=torch.int32), tuple(lengths))
    padded = to_padded(ragged, max(lengths) + room, pad=-1, left=left, dtype=torch.int64)
    mask = mask_of(lengths, max(lengths) + room, left=left)
    assert torch.equal(padded == -1, ~mask)
    back = from_padded(padded, mask.long(), left=left, dtype=torch.int32)
    assert back.lengths == ragged.lengths
    assert torch.equal(back.values, ragged.values)
    assert back.values.dtype == torch.int32


def test_samples_in_another_order():
    ragged = Ragged(torch.tensor([1, 2, 3]), (2, 0, 1))
    assert ragged.take([2, 0]).values.tolist() == [3, 1, 2]
    assert ragged.take([]).lengths == ()


@pytest.mark.parametrize(("call", "says"), [
    (lambda: Ragged(torch.zeros(3), (1, 1)), r"expected \[2\]"),
    (lambda: to_padded(Ragged(torch.zeros(3), (3,)), 2), "the longest sample has 3 values, expected 2"),
    (lambda: from_padded(torch.zeros(1, 3), torch.tensor([[1, 0, 1]])), "not one block that begins it"),
    (lambda: from_padded(torch.zeros(1, 2), torch.tensor([[1, 0]]), left=True), "not one block that ends it"),
])  # fmt: skip
def test_what_is_not_ragged_is_refused(call, says):
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
    asked = prompt_inputs(from_padded(prompts, prompt_mask, left=True, dtype=torch.int32), prompt_width, pad)
    for name, tensor in {"input_ids": prompts, "attention_mask": prompt_mask, "position_ids": prompt_places}.items():
        assert torch.equal(asked[name], tensor) and asked[name].dtype == torch.int64, name
    found = model_inputs(
        from_padded(prompts, prompt_mask, left=True, dtype=torch.int32),
        from_padded(responses, mask[:, prompt_width:], dtype=torch.int32),
        prompt_width,
        width,
        pad,
    )
    expected = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], 1),
        "attention_mask": mask,
        "position_ids": places,
    }
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert found[name].dtype == torch.int64
