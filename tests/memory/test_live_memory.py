"""Test that writes to each element of a tensor are counted, whatever the strides of tensor and writes."""

from __future__ import annotations

import torch

from verl_patches.memory.live_memory import write_faults


def test_a_padded_transposed_tensor_is_written_once_by_parts_of_any_strides():
    tensor = torch.empty(3, 8, 9, dtype=torch.bfloat16)[..., :7].transpose(1, 2)
    parts = [(str(i), part) for i, half in enumerate(tensor.split([3, 4], dim=1)) for part in half.mT.split(5, dim=1)]
    assert write_faults({"t": tensor}, parts) == []
    (missing,) = write_faults({"t": tensor}, parts[1:])
    assert "found 45 not written, the first at [0, 0, 0]" in missing
    (doubled,) = write_faults({"t": tensor}, [*parts, ("more", tensor[1:, 4:, 6:])])
    assert "found [1, 4, 6] written by 1 and by more" in doubled


def test_tensors_that_share_a_storage_are_told_apart():
    flat = torch.empty(10)
    a, b = flat[:4], flat[4:]
    assert write_faults({"a": a, "b": b}, [("x", a), ("y", b)]) == []
    assert write_faults({"a": a, "b": b}, [("x", flat)]) == []
    assert write_faults({"b": b}, [("x", a), ("y", flat[2:])]) == []  # both writes reach a, one of them reaches b
    (missing,) = write_faults({"a": a, "b": b}, [("x", flat[:6])])
    assert missing == "b: expected each of its 6 elements to be written once, found 4 not written, the first at [2]"
    (doubled,) = write_faults({"a": a, "b": b}, [("x", flat), ("y", flat[8:])])
    assert doubled == "b: expected each of its 6 elements to be written once, found [4] written by x and by y"
