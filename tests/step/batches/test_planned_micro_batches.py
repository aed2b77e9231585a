"""Test dynamic batch size with tensors that stay: verl's split follows the plan, for every replica alike."""

from itertools import chain

import pytest
import torch
from tensordict import TensorDict
from verl.utils.seqlen_balancing import get_reverse_idx, rearrange_micro_batches

from tests.step.batches.lengths import lognormal_lengths
from verl_patches.errors import RecipeError
from verl_patches.step.batches.batch_plan import plan_batch
from verl_patches.step.batches.micro_batches import Stage, current_stage, plan_stage_splits, split_as_planned

BUDGET, REPLICAS, MINI = 4096, 4, 64
LENGTHS = lognormal_lengths(128, 0.7, seed=4)
split = split_as_planned(rearrange_micro_batches)


def plan(lengths=LENGTHS):
    return plan_batch(range(REPLICAS), lengths, mini_batch_size=MINI, token_budget=BUDGET)


def rows(samples):
    """Return the batch that verl's actor splits: a row's values are its sample's number."""
    mask = torch.arange(4096) < torch.tensor([LENGTHS[s] for s in samples])[:, None]
    return TensorDict({"attention_mask": mask, "sample": torch.tensor(samples)[:, None]}, batch_size=len(samples))


def run(stage, replica, batches, budget=BUDGET):
    """Return (micro batches as lists of samples, places) of each batch, as verl's actor computes them in one stage."""
    with current_stage.set(Stage(splits=plan_stage_splits(stage, budget, plan(), replica, LENGTHS))):
        splits = [split(rows(samples), max_token_len=BUDGET) for samples in batches]
    return [([micro["sample"].flatten().tolist() for micro in micros], places) for micros, places in splits]


def replica_mini_batches(replica):
    placed = plan().replica_samples[replica]
    return [placed[at : at + MINI // REPLICAS] for at in range(0, len(placed), MINI // REPLICAS)]


def test_an_update_computes_the_plans_micro_batches_in_every_epoch():
    for replica in range(REPLICAS):
        two_epochs = [micros for micros, _ in run("update", replica, replica_mini_batches(replica) * 2)]
        assert two_epochs == [[list(micro) for micro in mini] for mini in plan().schedule[replica]] * 2


def test_a_pass_over_all_mini_batches_comes_back_in_order():
    """Restore the order as verl's actor does: join the results of all micro batches, take them by get_reverse_idx."""
    placed = plan().replica_samples[1]
    ((micros, places),) = run("log_prob", 1, [placed])
    joined = torch.tensor(list(chain.from_iterable(micros)))
    assert joined.tolist() != list(placed)
    assert joined[torch.tensor(get_reverse_idx(list(chain.from_iterable(places))))].tolist() == list(placed)


def test_without_a_budget_the_split_is_verls():
    samples = replica_mini_batches(2)[0]
    ((micros, places),) = run("update", 2, [samples], None)
    assert places == rearrange_micro_batches(rows(samples), max_token_len=BUDGET)[1]
    assert micros != [list(micro) for micro in plan().schedule[2][0]]


def test_other_rows_than_planned_are_refused_and_the_plan_ends_with_them():
    with pytest.raises(RecipeError, match="a batch of this stage has 16 rows"):
        run("update", 0, [replica_mini_batches(0)[1]])
    samples = replica_mini_batches(0)[0]
    assert split(rows(samples), max_token_len=BUDGET)[1] == rearrange_micro_batches(rows(samples), BUDGET)[1]
