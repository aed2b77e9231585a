"""Test tensors that stay on the workers: the trainer's messages in their place, and refused configurations."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl import DataProto
from verl.trainer.ppo.core_algos import agg_loss

from tests.runs import composed
from verl_patches.errors import ConfigError
from verl_patches.step.batches import cached_step, limits
from verl_patches.step.batches.cached_batch import CachedBatch, padded_prompts
from verl_patches.step.batches.cached_step import CachedStep
from verl_patches.step.batches.checks import micro_batch_checks
from verl_patches.step.batches.exchange import RaggedTensor, packed_ids, to_padded, unpacked_ids, value_mask
from verl_patches.step.batches.payloads import Advantages, LogProbs, Placement, ResponseIds
from verl_patches.step.replay.sample_seeds import SEEDS, SampleSeeds

TINY, LARGE = "deepseekv3_tiny_cpu", "deepseekv3_256die_true_weight"
ON, ROLLOUT, REF = "recipe.tensor_cache.enabled=true", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
ACTOR, DYNAMIC, LONGEST = "actor_rollout_ref.actor", "use_dynamic_bsz", 272
LENGTHS, WIDTH = (2, 3, 1, 3), 3
PLACED, ORDER = ((2, 0), (3, 1)), [1, 3, 2, 0]  # samples of each replica; the order of the trainer's rows
BUDGETS = {  # switch of a dynamic batch size: its budget
    f"{ACTOR}.{DYNAMIC}": f"{ACTOR}.ppo_max_token_len_per_gpu",
    f"{ROLLOUT}.log_prob_{DYNAMIC}": f"{ROLLOUT}.log_prob_max_token_len_per_gpu",
    f"{REF}.log_prob_{DYNAMIC}": f"{REF}.log_prob_max_token_len_per_gpu",
}
ALL_LONGEST = [f"{budget}={LONGEST}" for budget in BUDGETS.values()]


def refused(*overrides, name=TINY):
    return [check.detail for check in micro_batch_checks(composed(name, overrides)) if not check.ok]


REFUSED = {
    "recipe.rollout.replay=/somewhere": "recipe.rollout.replay gives responses to the trainer alone",
    f"{ACTOR}.data_loader_seed=1 {ACTOR}.shuffle=true": "actor.shuffle is true: micro batches would differ",
    "data.return_raw_chat=true": "return_raw_chat is true: raw prompts would not come back",
}


@pytest.mark.parametrize(("override", "words"), REFUSED.items(), ids=REFUSED)
def test_combinations_that_are_not_served_are_refused_by_name(override, words):
    (reason,) = refused(ON, *override.split())
    assert re.search(words, reason) and refused(*override.split()) == refused(ON) == refused(ON, name=LARGE) == []


@pytest.mark.parametrize(("switch", "budget"), BUDGETS.items())
def test_a_budget_that_a_sample_may_not_fit_is_refused(switch, budget):
    assert refused(ON, f"{switch}=true", *ALL_LONGEST) == []
    reasons = refused(ON, f"{switch}=true", f"{budget}={LONGEST - 1}")
    assert re.search(f"{budget.split('.')[-1]} {LONGEST - 1}: a sample may have {LONGEST} tokens", reasons[0])


def test_context_parallel_ranks_share_a_budget():
    budget = f"{ACTOR}.ppo_max_token_len_per_gpu={LONGEST // 2}"
    assert len(refused(f"{ACTOR}.{DYNAMIC}=true", budget)) == len(BUDGETS)  # the other switches follow the actor's
    assert refused(f"{ACTOR}.{DYNAMIC}=true", budget, f"{ACTOR}.megatron.context_parallel_size=2") == []


VALUES = torch.rand(4, WIDTH, generator=torch.Generator().manual_seed(1))  # a value of each token, by sample


def placed_step(send_back=False):
    """Return a step whose responses have been placed."""
    return CachedStep(0, WIDTH, True, send_back, lengths=LENGTHS)


def answers():
    """Return answers of two replicas (step/batches/cached_batch.py)."""
    found = []
    for placed in PLACED:
        values = [VALUES[s, : LENGTHS[s]] for s in placed]
        entropy = torch.stack([value.mean() for value in values]).numpy()
        found.append(LogProbs(np.array(placed, np.int32), entropy, torch.cat(values).numpy()))
    return found


def rows(order, **tensors):
    """Return the trainer's batch, in its own order."""
    mask = value_mask([LENGTHS[s] for s in order], WIDTH)
    return DataProto.from_dict({"sample": torch.tensor(order), "response_mask": mask.long(), **tensors})


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_entropy_loss_is_that_of_all_tokens(mode):
    batch = rows(ORDER)
    outputs, mask = placed_step().log_probs(batch, answers()).batch, batch.batch["response_mask"]
    assert list(outputs.keys()) == ["entropys"]  # log-probs stay on the workers
    expected = agg_loss(VALUES[ORDER], mask, mode)
    torch.testing.assert_close(agg_loss(outputs["entropys"], mask, mode), expected)


def test_log_probs_come_back_in_the_order_of_rows_where_they_are_needed():
    step, batch = placed_step(send_back=True), rows(ORDER)
    expected = VALUES[ORDER] * batch.batch["response_mask"]
    assert torch.equal(step.log_probs(batch, answers()).batch["old_log_probs"], expected)
    assert torch.equal(step.ref_log_probs(batch, answers()).batch["ref_log_prob"], expected)
    assert not placed_step().ref_log_probs(batch, []).batch.keys()


def test_an_outcome_reward_travels_as_one_advantage_a_sample():
    step, batch, sample_values = placed_step(), rows(ORDER), torch.tensor([0.0, 0.1, 0.2, 0.3])
    batch.batch["advantages"] = sample_values[ORDER][:, None] * batch.batch["response_mask"]
    sent = step.advantages(batch)
    assert (sent.values.tolist(), sent.per_token) == (sample_values.tolist(), False)
    batch.batch["advantages"] = VALUES[ORDER]
    sent = step.advantages(batch)
    assert (sent.values.tolist(), sent.per_token) == (
        torch.cat([VALUES[s, : LENGTHS[s]] for s in range(4)]).tolist(),
        True,
    )


def test_a_sample_without_tokens_is_not_taken_for_a_scalar():
    """Check this on the worker too, where there are as many values as samples."""
    values, per_token = cached_step._outcome_or_token_values(RaggedTensor(torch.tensor([1.0, 2.0]), (0, 2)))
    assert (values.tolist(), per_token) == ([1.0, 2.0], True)
    placement = Placement(np.array([1, 1]), np.array([0, 2]), (1, 2), 0, True)
    here, mask = SimpleNamespace(placement=placement, samples=(1, 0)), value_mask([2, 0], 2)
    for per_token, expected in ((True, [[1.0, 2.0], [0.0, 0.0]]), (False, [[2.0, 2.0], [0.0, 0.0]])):
        advantages = Advantages(values.numpy(), per_token, {})
        assert CachedBatch._padded_advantages(here, advantages, mask).tolist() == expected


def prompts(ids=(1, 2), **non_tensors):
    """Return two prompts of the trainer's, as verl's dataset has them; the first has one token more."""
    ragged = RaggedTensor(torch.tensor([*ids, 7]), (len(ids), 1))
    mask = value_mask(ragged.lengths, 4, left=True).long()
    batch = {"input_ids": to_padded(ragged, 4, left=True), "attention_mask": mask}
    return DataProto.from_dict(batch, {name: np.array(column, dtype=object) for name, column in non_tensors.items()})


def test_prompts_travel_without_padding_and_are_padded_again_on_the_worker():
    sent = CachedStep(0, WIDTH, True, False).begin(prompts(raw_prompt_ids=[[1, 2], [7]]))
    assert (sent.ids.dtype, sent.ids.tolist()) == (np.int32, [1, 2, 7])
    found = padded_prompts(sent, 0, 1)
    assert found.non_tensor_batch["raw_prompt_ids"].tolist() == [[1, 2], [7]]
    assert {name: tensor.tolist() for name, tensor in found.batch.items()} == {
        "input_ids": [[0, 0, 1, 2], [0, 0, 0, 7]],
        "attention_mask": [[0, 0, 1, 1], [0, 0, 0, 1]],
        "position_ids": [[0, 0, 0, 1], [0, 0, 0, 0]],
    }
    assert found.meta_info == {}
    ids = [padded_prompts(sent, rank, 2).batch["input_ids"].tolist() for rank in (0, 1)]
    assert ids == [[[0, 0, 1, 2]], [[0, 0, 0, 7]]]  # each rank has its own prompt
    with pytest.raises(ConfigError, match="2 prompts for 3 workers.*train_batch_size"):
        padded_prompts(sent, 0, 3)


def test_seeds_of_samples_go_with_their_prompts_to_a_rank():
    seeded = SampleSeeds(7).seeded(prompts(), 1)
    sent = CachedStep(0, WIDTH, True, False).begin(seeded)
    found = [padded_prompts(sent, rank, 2).batch[SEEDS].tolist() for rank in (0, 1)]
    assert [[each] for each in seeded.batch[SEEDS].tolist()] == found and found[0] != found[1]


@pytest.mark.parametrize("ids", [[], [0], [0, 1, 255, 256, 65_535, 65_536, 129_279, (1 << 24) - 1]])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_token_ids_of_three_bytes_are_the_same_ids(ids, dtype):
    packed = packed_ids(np.array(ids, dtype))
    assert packed.nbytes == limits.ID_BYTES * len(ids) and packed.flags.c_contiguous
    packed.flags.writeable = False  # as Ray's arrays are
    found = unpacked_ids(packed)
    assert found.dtype == np.int32 and found.tolist() == ids and torch.from_numpy(found.copy()).tolist() == ids


@pytest.mark.parametrize("wrong", [-1, 1 << 24])
def test_token_ids_that_three_bytes_do_not_hold_are_refused(wrong):
    with pytest.raises(ValueError, match=f"{wrong}.*expected 0 to 16777215"):
        packed_ids(np.array([5, wrong], np.int32))


def test_the_responses_of_two_ranks_become_verls_batch_in_the_order_of_samples():
    """Join two responses to each rank's prompt, of unequal lengths."""
    step, given = CachedStep(0, WIDTH, True, False), prompts(raw_prompt_ids=[[1, 2], [7]])
    asked = step.begin(given)
    generated = [([2, 3], [11, 12, 21, 22, 23]), ([1, 3], [31, 41, 42, 43])]
    batch, placement = step.responses(
        given, [ResponseIds(np.array(lengths, np.int32), packed_ids(np.array(ids))) for lengths, ids in generated]
    )
    found = batch.batch
    expected = {
        "sample": [0, 1, 2, 3],
        "prompts": [[0, 0, 1, 2], [0, 0, 1, 2], [0, 0, 0, 7], [0, 0, 0, 7]],
        "responses": [[11, 12, 0], [21, 22, 23], [31, 0, 0], [41, 42, 43]],
        "attention_mask": [[0, 0, 1, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1]],
        "position_ids": [[0, 0, 0, 1, 2, 3, 4]] * 2 + [[0, 0, 0, 0, 1, 2, 3]] * 2,
    }
    assert {name: found[name].tolist() for name in expected} == expected
    assert torch.equal(found["input_ids"], torch.cat([found["prompts"], found["responses"]], 1))
    assert set(found.keys()) == {*expected, "input_ids"}
    assert asked.ids.tolist() == [1, 2, 7]
    assert (placement.prompt_lengths.tolist(), placement.response_lengths.tolist()) == ([2, 2, 1, 1], [2, 3, 1, 3])
    assert {array.dtype for array in (placement.prompt_lengths, placement.response_lengths)} == {np.dtype(np.int32)}
    assert (placement.widths, placement.pad_id, placement.balance_batch) == ((4, WIDTH), 0, True)


@pytest.mark.parametrize(("more", "words"), [
    ({"raw_prompt_ids": [[1, 2], [8]]}, r"raw_prompt_ids of prompt 1 \(1 tokens\) differ from its input_ids"),
    ({"multi_modal_data": [{}, {}]}, "prompts have multi_modal_data, which is not returned"),
])  # fmt: skip
def test_prompts_that_are_not_text_are_refused_before_anything_runs(more, words):
    step = CachedStep(0, WIDTH, True, False)
    with pytest.raises(ConfigError, match=words):
        step.begin(prompts(**more))
