"""Test tokens of each expert: counted from ids and from maps, summed over ranks with two experts once a step."""

import pytest
import torch
import torch.distributed as dist

from verl_patches.step.replay.expert_load import ExpertLoad


def taken():
    """Return a rank's load of 2 layers of 4 experts in two steps: ranks 0 and 1 have layer 0, step two is empty."""
    load = ExpertLoad(2, 4, {"train": 2, "rollout": 4, "uneven": 3}, torch.device("cpu"))
    if dist.get_rank() < 2:
        load.add(0, torch.tensor([[0, 1], [2, 3]]))  # an even load
    load.add(1, torch.tensor([[0, 3], [0, 1]]))
    load.add(1, torch.tensor([[True, False, False, False]]))
    return load.take(), load.take()


@pytest.mark.slow
def test_the_least_even_layer_over_all_ranks(ranks4):
    for step, empty in ranks4.run("tests.step.replay.test_expert_load:taken"):
        largest = pytest.approx(3 / (5 / 4))
        ranks = pytest.approx((1 + 4 / 2.5) / 2)  # layer 0: 4 and 4 tokens, layer 1: 4 and 1
        spread = {"max_over_mean": largest, "mean_over_layers": pytest.approx(1.7), "ranks_over_mean": ranks}
        assert step.keys() == {"train", "rollout"}
        assert step["train"] == {**spread, "layers": 2}
        assert step["rollout"] == {**spread, "layers": 2, "ranks_over_mean": pytest.approx((1 + 3 / 1.25) / 2)}
        assert empty is None
