"""Dynamic micro batches of line a3 without ranks: order of outputs, and when nothing is changed."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl_patches.batches.micro_batches import Packing, Stage, by_tokens, current_stage, in_stage, packing
from verl_patches.errors import ConfigError
from verl_patches.worker import recipe_worker

PACKINGS = [[[0], [1], [2], [3], [4]], [[3, 1], [4, 2, 0]], [[4, 3, 2, 1, 0]]]  # the second is not its own inverse


@pytest.mark.parametrize("rows", PACKINGS)
def test_outputs_come_back_in_the_order_of_the_batch(rows):
    now, whole = Packing(100), torch.arange(10.0).view(5, 2)
    now.rows = rows
    (found,) = now.in_order([{"log_probs": whole[part]} for part in rows])
    ((both, entropy),) = now.in_order([[{"log_probs": whole[part]}, -whole[part]] for part in rows])
    assert found["log_probs"].equal(whole) and both["log_probs"].equal(whole) and entropy.equal(-whole)
    assert now.in_order([]) == []  # not the last stage


def test_only_a_stage_with_a_budget_is_packed(monkeypatch):
    from verl.utils import seqlen_balancing

    seen = []
    monkeypatch.setattr(seqlen_balancing, "rearrange_micro_batches", lambda batch, max_token_len: (batch, [[0], [1]]))
    split = by_tokens(lambda tensors, batch_size: ("verl's", batch_size))

    def forward_backward_batch(actor, data, forward_only):
        seen.append((split("batch", data.meta_info["micro_batch_size"]), current_stage.value))
        return "outputs"

    run, data = packing(forward_backward_batch), SimpleNamespace(meta_info={"micro_batch_size": None})
    assert run(None, data, False) == "outputs" and seen.pop() == (("verl's", None), Stage())
    with in_stage(Stage(300)):
        assert run(None, data, False) == "outputs"
        parts, now = seen.pop()
        assert parts == "batch" and now.packing.budget == 300 and now.packing.rows == [[0], [1]]
        with pytest.raises(ZeroDivisionError):
            packing(lambda *_: 1 / 0)(None, data, True)
        assert current_stage.value == Stage(300)
    assert current_stage.value == Stage()


@pytest.mark.parametrize(("line", "on", "budget"), [("a3", True, 300), ("a3", False, None), ("pypi", False, 0)])
def test_a_row_that_is_off_does_not_make_micro_batches_fixed_in_silence(monkeypatch, line, on, budget):
    """Line pypi's verl has dynamic micro batches of its own."""
    monkeypatch.setattr(recipe_worker, "is_on", lambda row: on)
    worker = object.__new__(recipe_worker.RecipeWorker)
    actor = {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 300, "megatron": {"context_parallel_size": 1}}
    worker.config, worker.recipe = OmegaConf.create({"actor": actor}), OmegaConf.create({"line": line})
    if budget is None:
        with pytest.raises(ConfigError, match="row update.dynamic_batches is off"):
            worker._token_budget("update")
        return
    assert worker._token_budget("update") == (budget or None)
