"""Test dynamic micro batches of line a3 without ranks: order of outputs, and when nothing is changed."""

import pytest
import torch
from omegaconf import OmegaConf

from verl_patches.step.batches.micro_batches import PackedPass
from verl_patches.worker import recipe_worker

# rows of each micro batch; the second order is not its own inverse
PACKINGS = [[[0], [1], [2], [3], [4]], [[3, 1], [4, 2, 0]], [[4, 3, 2, 1, 0]]]


@pytest.mark.parametrize("rows", PACKINGS)
def test_outputs_come_back_in_the_order_of_the_batch(rows):
    now, whole = PackedPass(100), torch.arange(10.0).view(5, 2)
    now.rows = rows
    (found,) = now.restore_order([{"log_probs": whole[part]} for part in rows])
    ((both, entropy),) = now.restore_order([[{"log_probs": whole[part]}, -whole[part]] for part in rows])
    assert found["log_probs"].equal(whole) and both["log_probs"].equal(whole) and entropy.equal(-whole)
    assert now.restore_order([]) == []  # not the last stage


@pytest.mark.parametrize(("on", "budget"), [(True, 600), (False, None)])
def test_the_row_makes_micro_batches_of_the_budget_that_context_parallel_ranks_share(monkeypatch, on, budget):
    monkeypatch.setattr(recipe_worker, "is_on", lambda row: on)
    worker = object.__new__(recipe_worker.RecipeWorker)
    actor = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 300, "megatron": {"context_parallel_size": 2}}
    worker.config = OmegaConf.create({"actor": actor})
    assert worker._token_budget("update") == budget
