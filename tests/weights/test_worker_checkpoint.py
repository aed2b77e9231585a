"""A worker's checkpoint on gloo ranks: errors of one rank are raised by all, generators go on where they were."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist

from verl_patches.weights.checkpoint_files import CheckpointError


def same_error(folder):
    """What each rank raises when rank 1 finds a fault and rank 2 fails."""
    from verl_patches.worker.checkpoint import _same_on_all

    def work():
        if dist.get_rank() == 2:
            raise OSError("no disk")
        return ["rank_00001.safetensors, weight/x: expected sha256 1, found 2"] * (dist.get_rank() == 1)

    _same_on_all(lambda: None, folder)
    try:
        _same_on_all(work, folder)
    except CheckpointError as error:
        return str(error)


def test_a_fault_on_one_rank_is_an_error_on_all(ranks4):
    first, *others = ranks4.run(same_error, "/c/global_step_2")
    assert others == [first] * 3
    assert "/c/global_step_2 cannot be resumed from" in first and "rank 2: OSError: no disk" in first
    assert "rank 1: rank_00001.safetensors, weight/x: expected sha256 1" in first


@pytest.mark.parametrize("platform", ["cpu", "npu_emulated"])
def test_generators_go_on_where_they_were(platform):
    import json

    from verl_patches.worker.checkpoint import generators, set_generators

    def draw():
        return [random.gauss(0, 1), random.random(), *np.random.randn(3), *torch.rand(3).tolist()]

    draw(), np.random.randn()
    found = json.loads(json.dumps(generators(platform)))
    drawn = draw()
    assert draw() != drawn
    set_generators(found, platform)
    assert draw() == drawn
