"""Log-probs that stay: how much of them a stage moves to the host, counted at torch's own calls."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from verl import DataProto

from verl_patches.batches import cached_stages
from verl_patches.batches.batch_plan import plan_batch
from verl_patches.batches.cached_stages import taken
from verl_patches.batches.exchange import Ragged

PROMPTS, RESPONSES, WIDTHS = (1, 2, 3, 2), (5, 2, 6, 4), (3, 6)
STAGES = [("log_prob", "old_log_probs"), ("ref", "ref_log_prob")]


class HostCopies(TorchFunctionMode):
    """The most values of any call that gives them to the host; on a CPU such calls are made all the same."""

    def __init__(self):
        super().__init__()
        self.most = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__
        to_host = name == "to" and "cpu" in map(str, [*args[1:], *(kwargs or {}).values()])
        if to_host or name in ("cpu", "numpy", "tolist", "item", "__array__"):
            self.most = max(self.most, args[0].numel())
        return function(*args, **(kwargs or {}))


class Actor:
    """Stands for MegatronPPOActor: padded values, as they would come from the model."""

    def compute_log_prob(self, data, calculate_entropy=False):
        shape = data.batch["responses"].shape
        values = -torch.arange(1.0, 1 + shape.numel()).reshape(shape)
        return values, -2 * values


class Worker:
    """The end of verl's two calls at 0.4.0 (verl/workers/megatron_workers.py); the actor computes the reference too."""

    def __init__(self):
        self.actor = self.ref_policy = Actor()
        actor = SimpleNamespace(get=lambda name: None)
        self.config = {"actor": actor, "rollout": actor, "ref": actor}

    def compute_log_prob(self, data):
        found, entropies = self.actor.compute_log_prob(data=data, calculate_entropy=True)
        return DataProto.from_dict(tensors={"old_log_probs": found, "entropys": entropies}).to("cpu")

    def compute_ref_log_prob(self, data):
        found, _ = self.ref_policy.compute_log_prob(data=data, calculate_entropy=False)
        return DataProto.from_dict(tensors={"ref_log_prob": found}).to("cpu")


class WorkerOfA3(Worker):
    """As at 54c9b736, where the answer has the inputs too."""

    def compute_log_prob(self, data):
        found, entropies = self.actor.compute_log_prob(data=data, calculate_entropy=True)
        data.batch["old_log_probs"], data.batch["entropys"] = found, entropies
        return data.to("cpu")


@pytest.fixture
def here(monkeypatch):
    """One process that computes all samples, after the exchange."""
    monkeypatch.setattr(cached_stages, "dist", SimpleNamespace(get_rank=lambda: 0))
    monkeypatch.setattr(cached_stages, "is_metrics_rank", lambda: True)
    tokens = tuple(map(sum, zip(PROMPTS, RESPONSES, strict=True)))
    plan = plan_batch([0], tokens, mini_batch_size=4, micro_batch_size=1)
    payload = {"widths": WIDTHS, "pad": 0, "balance": True, "responses": np.array(RESPONSES)}
    batch = cached_stages.CachedBatch("cpu", None)
    batch.plan, batch.payload, batch.tokens = plan, payload, tokens
    batch.cache.open(1)
    for name, of_sample in (("prompts", PROMPTS), ("responses", RESPONSES)):
        lengths = tuple(of_sample[s] for s in batch.samples)
        batch.cache.put(1, name, batch.samples, Ragged(torch.ones(sum(lengths), dtype=torch.int32), lengths))
    return batch


def run(here, stage, worker, send_back):
    with HostCopies() as copies:
        answer = here.run(worker, stage, 1, {"send_back": send_back})
    return answer, copies.most


@pytest.mark.parametrize("worker", [Worker, WorkerOfA3])
@pytest.mark.parametrize(("stage", "name"), STAGES)
def test_only_requested_values_leave_the_device_once_and_without_padding(here, stage, name, worker):
    answer, most = run(here, stage, worker(), send_back=False)
    assert most <= len(PROMPTS)  # lengths, and one entropy a sample
    cached = here.cache.get(1, name, here.samples)
    assert len(cached.values) == sum(RESPONSES) and (cached.values < 0).all()
    if stage == "log_prob":
        assert answer["entropy"].tolist() == pytest.approx([2 * part.mean().abs().item() for part in cached.parts()])
        assert "values" not in answer
    else:
        assert answer is None
    answer, most = run(here, stage, worker(), send_back=True)
    assert most == sum(RESPONSES) and answer["values"].tolist() == here.cache.get(1, name, here.samples).values.tolist()


@pytest.mark.parametrize(("worker", "expected"), [(Worker, 4 * WIDTHS[1]), (WorkerOfA3, 4 * sum(WIDTHS))])
def test_verls_own_copies_would_be_counted(here, worker, expected):
    data, _ = here._inputs(1)
    with HostCopies() as copies:
        worker().compute_log_prob(data)
    assert copies.most == expected


def test_an_actor_is_as_it_was_also_after_an_error():
    actor = Actor()
    with pytest.raises(ZeroDivisionError), taken(actor):
        1 / 0  # noqa: B018
    assert "compute_log_prob" not in vars(actor)
