"""Tensors that stay on the workers: what the trainer sends and gets instead, and which configurations are refused."""

import re

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss

from verl_patches.cluster.checks import check_config
from verl_patches.cluster.compose import CONFIGS_DIR, compose
from verl_patches.comm.ragged import Ragged, mask_of
from verl_patches.training import kept_batch
from verl_patches.training.kept_batch import Kept, KeptOnWorkers

TINY, LARGE = "grpo_deepseekv3_tiny_cpu", "grpo_deepseekv3_256die_true_weight"
ON, ROLLOUT = "recipe.tensor_cache.enabled=true", "actor_rollout_ref.rollout"
LENGTHS, WIDTH = (2, 3, 1, 3), 3
PLACED = ((2, 0), (3, 1))  # two replicas


def refused(*overrides, name=TINY):
    return [c.detail for c in check_config(compose(name, overrides), CONFIGS_DIR) if c.name == "tensor cache"]


@pytest.mark.parametrize("name", [TINY, LARGE])
def test_the_configs_of_this_repository_can_keep_their_tensors(name):
    assert refused(ON, name=name) == []


@pytest.mark.parametrize(("override", "words"), [
    (f"{ROLLOUT}.mode=async", "is vllm, async; only vllm, sync"),
    (f"{ROLLOUT}.multi_turn.enable=true", "multi_turn.enable is true: its masks have holes"),
    ("recipe.rollout.replay=/somewhere", "recipe.rollout.replay gives responses to the trainer alone"),
    ("actor_rollout_ref.actor.shuffle=true", "actor.shuffle is true: micro batches would be others"),
])
def test_what_cannot_be_kept_is_refused_by_name(override, words):
    (told,) = refused(ON, override)
    assert re.search(words, told)
    assert refused(override) == []


class Workers:
    """Answers as two replicas do (kept_worker.py), from per-token values [B, S] by sample."""

    def __init__(self, values):
        self.values, self.calls = values, []

    def generate_sequences(self, prompts):
        return "verl's own"

    def run_kept(self, stage, step, told=None):
        self.calls.append((stage, told))
        found = [None]  # a rank that does not speak for its replica
        for samples in PLACED:
            values = torch.cat([self.values[s, : LENGTHS[s]] for s in samples]).numpy()
            entropy = np.array([self.values[s, : LENGTHS[s]].mean() for s in samples], dtype=np.float32)
            found.append({"samples": samples, "entropy": entropy, "values": values})
        return [{"metric": [1.0]}] * 2 if stage == "update" else found


@pytest.fixture
def make():
    """make(send_back) -> (group, workers)."""

    def build(send_back=False):
        workers = Workers(torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(1)))
        kept = Kept(0, WIDTH, True, send_back, step=5, lengths=LENGTHS, open=True)
        return KeptOnWorkers(workers, kept), workers

    return build


def rows(order, **tensors):
    """The trainer's batch, ordered by itself."""
    mask = mask_of([LENGTHS[s] for s in order], WIDTH)
    return DataProto.from_dict({"sample": torch.tensor(order), "response_mask": mask.long(), **tensors})


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_entropy_loss_is_that_of_all_tokens(make, mode):
    group, workers = make()
    order = [3, 0, 2, 1]
    batch = rows(order)
    found = group.compute_log_prob(batch).batch["entropys"]
    expected = agg_loss(workers.values[order], batch.batch["response_mask"], mode)
    torch.testing.assert_close(agg_loss(found, batch.batch["response_mask"], mode), expected)
    assert list(group.compute_log_prob(batch).batch.keys()) == ["entropys"]  # log-probs stay


def test_log_probs_come_back_in_the_order_of_rows_where_they_are_needed(make):
    group, workers = make(send_back=True)
    order = [1, 3, 2, 0]
    batch = rows(order)
    expected = workers.values[order] * batch.batch["response_mask"]
    assert torch.equal(group.compute_log_prob(batch).batch["old_log_probs"], expected)
    assert torch.equal(group.compute_ref_log_prob(batch).batch["ref_log_prob"], expected)


def test_an_outcome_reward_travels_as_one_advantage_a_sample(make):
    group, workers = make()
    order = [1, 3, 2, 0]
    batch = rows(order)
    of_sample = torch.tensor([0.0, 0.1, 0.2, 0.3])
    batch.batch["advantages"] = of_sample[order][:, None] * batch.batch["response_mask"]
    assert group.update_actor(batch).meta_info["metrics"] == {"metric": [1.0]}
    assert workers.calls[-1][1]["advantages"].tolist() == of_sample.tolist()
    batch.batch["advantages"] = workers.values[order]
    group.update_actor(batch)
    tokens = torch.cat([workers.values[s, : LENGTHS[s]] for s in range(4)])
    assert workers.calls[-1][1]["advantages"].tolist() == tokens.tolist()


def test_a_sample_without_tokens_is_not_taken_for_a_scalar():
    ragged = Ragged(torch.tensor([1.0, 2.0]), (0, 2))
    assert kept_batch._smallest(ragged).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("meta", [{"validate": True}, {"do_sample": False}])
def test_validation_and_greedy_baselines_are_not_kept(make, meta):
    group, _ = make()
    before = group._kept.step
    assert group.generate_sequences(DataProto(meta_info=meta)) == "verl's own"
    assert group._kept.step == before


def test_a_step_without_an_update_is_closed_at_its_end(make):
    group, workers = make()
    group.end_step()
    assert [stage for stage, _ in workers.calls] == ["close"]
    group.end_step()
    assert len(workers.calls) == 1
