"""Log-probs that stay: what a worker keeps of verl's answer, and what it returns to the trainer."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl import DataProto

from verl_patches.batches import cached_batch
from verl_patches.batches.batch_plan import plan_batch
from verl_patches.batches.cached_batch import CachedBatch
from verl_patches.batches.exchange import Ragged
from verl_patches.batches.payloads import LogProbRequest, Placement
from verl_patches.patching.row import subclass_of
from verl_patches.worker import recipe_worker
from verl_patches.worker.recipe_worker import RecipeWorker

PROMPTS, RESPONSES, WIDTHS = (1, 2, 3, 2), (5, 2, 6, 4), (3, 6)


class Worker:
    """The answers of verl's two calls, from padded values as they would come from the model."""

    def __init__(self):
        fixed = SimpleNamespace(get=lambda name: None)  # micro batches of a fixed size
        self.config, self.recipe = {"actor": fixed, "rollout": fixed, "ref": fixed}, SimpleNamespace(line="pypi")

    def compute_log_prob(self, data):
        values = -torch.arange(1.0, 1 + data.batch["responses"].numel()).view(data.batch["responses"].shape)
        return DataProto.from_dict(tensors={"old_log_probs": values, "entropys": -2 * values})

    def compute_ref_log_prob(self, data):
        return DataProto.from_dict(tensors={"ref_log_prob": self.compute_log_prob(data).batch["old_log_probs"]})


class WorkerOfA3(Worker):
    """As at 54c9b736, where the answer has the inputs too."""

    def compute_log_prob(self, data):
        return data.union(Worker.compute_log_prob(self, data))


@pytest.fixture
def here(monkeypatch):
    """The batch of one process that computes all samples, after the exchange."""
    for module in (cached_batch, recipe_worker):
        monkeypatch.setattr(module, "is_metrics_rank", lambda: True)
    monkeypatch.setattr(cached_batch, "dist", SimpleNamespace(get_rank=lambda: 0))
    monkeypatch.setattr(recipe_worker, "is_on", lambda row: False)
    tokens = tuple(map(sum, zip(PROMPTS, RESPONSES, strict=True)))
    batch = CachedBatch("cpu", None)
    batch.plan, batch.tokens = plan_batch([0], tokens, mini_batch_size=4, micro_batch_size=1), tokens
    batch.placement = Placement(1, np.array(PROMPTS), np.array(RESPONSES), WIDTHS, 0, True)
    batch.cache.open(1)
    for name, of_sample in (("prompts", PROMPTS), ("responses", RESPONSES)):
        lengths = tuple(of_sample[s] for s in batch.samples)
        batch.cache.put(1, name, batch.samples, Ragged(torch.ones(sum(lengths), dtype=torch.int32), lengths))
    with cached_batch.cached_batch.set(batch):
        yield batch


@pytest.mark.parametrize("upstream", [Worker, WorkerOfA3])
@pytest.mark.parametrize(
    ("stage", "name"), [("log_prob_cached", "old_log_probs"), ("ref_log_prob_cached", "ref_log_prob")]
)
def test_log_probs_stay_without_padding_and_are_returned_where_they_are_requested(here, stage, name, upstream):
    worker = object.__new__(subclass_of(upstream, RecipeWorker))
    upstream.__init__(worker)
    answer = getattr(worker, stage)(LogProbRequest(1, send_back=False))
    cached = here.cache.get(1, name, here.samples)
    assert cached.lengths == tuple(RESPONSES[s] for s in here.samples) and (cached.values < 0).all()
    if stage == "log_prob_cached":
        assert answer.samples.tolist() == list(here.samples) and answer.values is None
        assert answer.entropy.tolist() == pytest.approx([2 * part.mean().abs().item() for part in cached.parts()])
    else:
        assert answer is None
    answer = getattr(worker, stage)(LogProbRequest(1, send_back=True))
    assert answer.values.tolist() == cached.values.tolist()
