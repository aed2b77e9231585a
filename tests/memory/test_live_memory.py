"""Test the interval arithmetic of writes against counting by element."""

from __future__ import annotations

import random

import pytest
import torch

from verl_patches.memory.live_memory import write_faults


def _counted(tensor: torch.Tensor, views: list[torch.Tensor]) -> torch.Tensor:
    """Return how often the views reach each element of `tensor`."""
    whole = torch.zeros(tensor.untyped_storage().nbytes() // tensor.element_size(), dtype=torch.int64)
    for view in views:
        whole.as_strided(view.shape, view.stride(), view.storage_offset()).add_(1)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _random_part(tensor: torch.Tensor, draw: random.Random) -> torch.Tensor:
    for axis, length in enumerate(tensor.shape):
        start = draw.choice([0, 0, draw.randrange(length)])
        tensor = tensor.narrow(axis, start, draw.choice([length - start, draw.randint(1, length - start)]))
    return tensor.permute(draw.sample(range(tensor.dim()), tensor.dim()))


def _halves(tensor: torch.Tensor, draw: random.Random) -> list[torch.Tensor]:
    axis = draw.randrange(tensor.dim())
    cut = draw.randrange(1, tensor.shape[axis])
    return list(tensor.split([cut, tensor.shape[axis] - cut], dim=axis))


@pytest.mark.parametrize("seed", range(60))
def test_it_says_what_counting_says(seed):
    draw = random.Random(seed)
    storage = torch.empty(3, 8, 9, dtype=draw.choice([torch.bfloat16, torch.float32]))
    tensor = storage[..., :7].transpose(1, 2) if seed % 2 else storage
    views = _halves(tensor, draw)
    views = [part for view in views for part in (_halves(view, draw) if min(view.shape) > 1 else [view])]
    if seed % 3:
        views = views[: draw.randint(1, len(views))] + [_random_part(storage, draw)] * (seed % 3 - 1)
    draw.shuffle(views)
    counts = _counted(tensor, views)
    found = write_faults({"t": tensor}, [(str(number), view) for number, view in enumerate(views)])
    missing, doubled = int((counts == 0).sum()), int((counts > 1).sum())
    assert any("written by" in problem for problem in found) == (doubled > 0)
    assert [f"found {missing} not written" in problem for problem in found if "not written" in problem] == [True] * (
        missing > 0
    )
    for problem in found:
        place = tuple(map(int, problem.split("[")[-1].split("]")[0].split(",")))
        assert counts[place] == 0 if "not written" in problem else counts[place] > 1
    assert len(found) == (missing > 0) + (doubled > 0)


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
    (doubled,) = write_faults({"b": b}, [("x", flat), ("y", flat[3:])])  # the overlap begins before b
    assert "found [0] written by x and by y" in doubled
    (missing,) = write_faults({"a": a}, [])
    assert "found 4 not written, the first at [0]" in missing
