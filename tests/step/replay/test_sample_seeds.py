"""Test the seeds of a step's samples; tests/loop/test_seeds.py has a run."""

import pytest
import torch
from verl import DataProto
from vllm import SamplingParams

from verl_patches.step.replay.sample_seeds import SEEDS, SampleSeeds, seeded_params


def prompts(count=4, **meta):
    return DataProto.from_dict(tensors={"input_ids": torch.zeros(count, 2)}, meta_info=meta)


def drawn(seeds, step, batch=None):
    return seeds.seeded(batch or prompts(), step).batch[SEEDS].tolist()


def test_seeds_depend_on_seed_step_and_place_alone():
    """Check that a resumed run, which begins at a later step, has those of the uninterrupted one."""
    whole, resumed = SampleSeeds(7), SampleSeeds(7)
    steps = [drawn(whole, step) for step in (1, 2, 3)]
    assert [drawn(resumed, step) for step in (2, 3)] == steps[1:]
    assert len({seed for step in steps for seed in step}) == 12 and all(0 <= s < 2**63 for s in steps[0])
    assert drawn(SampleSeeds(8), 1) != steps[0]
    padded = drawn(SampleSeeds(7), 1, prompts(6))  # verl pads a validation to the number of ranks
    assert padded[:4] == steps[0]


def test_each_batch_of_a_step_and_its_validation_have_seeds_of_their_own():
    seeds, validation = SampleSeeds(7), prompts(validate=True)
    first = [drawn(seeds, 1), drawn(seeds, 1), drawn(seeds, 1, validation), drawn(seeds, 1, validation)]
    assert len({seed for batch in first for seed in batch}) == 16
    again = SampleSeeds(7)  # a resumed run validates before its first step
    assert [drawn(again, 1, validation), drawn(again, 1, validation)] == first[2:]
    assert not set(drawn(again, 2)) & {seed for batch in first for seed in batch}


def test_the_batch_that_verl_holds_has_no_new_column():
    own = prompts(do_sample=True)
    seeded = SampleSeeds(0).seeded(own, 1)
    assert SEEDS not in own.batch.keys() and seeded.meta_info == {"do_sample": True}


@pytest.mark.parametrize("n", [1, 2])
def test_each_request_has_its_seed_unless_it_is_greedy(n):
    params, greedy = SamplingParams(seed=7, n=n, temperature=0.5), SamplingParams(temperature=0.0)
    each = seeded_params(params, [5, 9])
    assert [(own.seed, own.n, own.temperature) for own in each] == [(5, n, 0.5), (9, n, 0.5)] and params.seed == 7
    assert seeded_params(greedy, [5, 9]) is greedy
