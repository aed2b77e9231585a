"""Test dynamic sampling by verl's own loader, batch and fit() lines: kept groups, columns, counts, bounds, resume."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl import DataProto
from verl.utils.dataset.rl_dataset import collate_fn

from tests.runs import composed
from verl_patches.errors import ConfigError, RecipeError
from verl_patches.rules import RULES
from verl_patches.step.batches.filter_groups import FilterGroupsLoader

SIZE, N, PROMPTS = 2, 3, 10
# scores of each prompt's responses: equal sixths and thirds have a standard deviation above 0 in floats
SCORES = torch.tensor(
    [[0.1] * 3, [1, 0, 0], [0.7] * 3, [0] * 3, [0, 1, 1], [1, 1, 0], [2, 1, 0], [1] * 3, [0] * 3, [0] * 3]
)


class Data(torch.utils.data.Dataset):
    """Hold rows as verl's RLHFDataset returns them."""

    def __len__(self):
        return PROMPTS

    def __getitem__(self, at):
        ids = torch.full((4,), at)
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(4)}
        others = {
            "raw_prompt_ids": [at] * (at % 3 + 1),
            "reward_model": {"ground_truth": at},
            "data_source": f"of {at}",
        }
        return {**tensors, **others, "index": at}


class Workers:
    """Answer each prompt with responses made of its number and theirs."""

    def __init__(self):
        self.generated = []

    def generate_sequences(self, prompts):
        assert len(prompts.non_tensor_batch["raw_prompt_ids"]) == SIZE
        ids = prompts.batch["input_ids"].repeat_interleave(N, 0)
        self.generated += prompts.batch["input_ids"][:, 0].tolist()
        responses = torch.stack([ids[:, 0], torch.arange(N).repeat(SIZE)], 1)
        return DataProto.from_dict(tensors={"input_ids": torch.cat([ids, responses], 1), "responses": responses})


def reward_fn(data, return_dict):
    """Reward by verl's contract, from the columns of each response."""
    assert return_dict
    golds = [row["ground_truth"] for row in data.non_tensor_batch["reward_model"]]
    prompts, numbers = data.batch["responses"].T
    assert golds == prompts.tolist()
    scores = torch.zeros(len(data), 2)
    scores[:, 1] = SCORES[prompts, numbers]
    return {"reward_tensor": scores, "reward_extra_info": {"acc": (scores[:, 1] == 1).float().tolist()}}


def filtered_groups(metric="score", max_num_gen_batches=4, state=None):
    """Return (FilterGroupsLoader, its workers, calls), which trainer/run.py puts in place of the trainer's loader."""
    config = OmegaConf.create(
        {"recipe": {"filter_groups": {"metric": metric, "max_num_gen_batches": max_num_gen_batches}}}
    )
    loader = StatefulDataLoader(Data(), SIZE, drop_last=True, collate_fn=collate_fn)
    if state is not None:
        loader.load_state_dict(state)
    workers, calls = Workers(), []
    trainer = SimpleNamespace(config=config, train_dataloader=loader, reward_fn=reward_fn)
    return FilterGroupsLoader(trainer, workers.generate_sequences, calls.append), workers, calls


def fit_step_batch(kept, batch_dict):
    """Return a step's batch by the lines of RayPPOTrainer.fit at both pins, as the reward gets it."""
    # as DataProto.from_dict of 54c9b736 copies columns
    tensors = {name: column for name, column in batch_dict.items() if torch.is_tensor(column)}
    copied = tensors | {name: column.copy() for name, column in batch_dict.items() if name not in tensors}
    batch = DataProto.from_single_dict(copied)
    gen_batch = batch.pop(["input_ids", "attention_mask", "position_ids"], ["raw_prompt_ids"])
    output = kept.draw_filtered_groups(gen_batch)
    batch.non_tensor_batch["uid"] = np.array([str(at) for at in range(len(batch.batch))], dtype=object)
    return batch.repeat(repeat_times=N, interleave=True).union(output)


def steps(kept, count):
    """Return [(prompts of the rows of a step's batch, its report)]."""
    found = []
    for batch_dict in kept:
        batch = fit_step_batch(kept, batch_dict)
        prompts = batch.batch["responses"][:, 0].tolist()
        assert [row["ground_truth"] for row in batch.non_tensor_batch["reward_model"]] == prompts
        assert batch.non_tensor_batch["data_source"].tolist() == [f"of {at}" for at in prompts]
        assert batch.non_tensor_batch["index"].tolist() == prompts
        assert batch.batch["responses"][:, 1].tolist() == list(range(N)) * SIZE
        assert batch.non_tensor_batch["uid"].tolist() == [str(at // N) for at in range(SIZE * N)]
        found.append((prompts, dict(kept.report)))
        if len(found) == count:
            return found
    raise AssertionError("the loader ended")


def test_prompts_are_drawn_until_the_batch_is_full_of_groups_that_differ():
    kept, workers, calls = filtered_groups()
    found = steps(kept, 3)
    assert [prompts[::N] for prompts, _ in found] == [[1, 4], [6, 1], [4, 5]]  # the third epoch begins at 0 again
    assert all(SCORES[at].max() > SCORES[at].min() for prompts, _ in found for at in prompts)
    assert [report["drawn_batches"] for _, report in found] == [3, 3, 2]
    assert found[0][1] == {"drawn_batches": 3, "prompts": 6, "differ": 3, "kept_share": 0.5}
    assert workers.generated == [*range(10), 0, 1, *range(2, 6)]
    between = ["reward", "generate_sequences"]  # of batches; trainer/worker_group.py calls before the first
    assert calls == [*between * 2, "reward"] * 2 + [*between, "reward"]
    plain, _, _ = filtered_groups()  # negative control: the loader's own first batch
    assert next(iter(plain))["input_ids"][:, 0].tolist() == [0, 1]
    assert SCORES[0].std() >= 0 == SCORES[0].max() - SCORES[0].min()


def test_a_metric_of_the_reward_function_decides():
    assert [prompts[::N] for prompts, _ in steps(filtered_groups("acc")[0], 1)] == [[1, 4]]
    with pytest.raises(ConfigError, match="metric is 'accuracy'; the reward function gives acc, score"):
        steps(filtered_groups("accuracy")[0], 1)


def test_a_step_that_finds_too_few_ends_the_run():
    with pytest.raises(RecipeError, match=r"only 1 of 4 prompts \(25.0%\) in 2 batches .*'score', expected 2"):
        steps(filtered_groups(max_num_gen_batches=2)[0], 1)


def test_a_resumed_run_draws_what_the_run_would_have_drawn():
    kept, *_ = filtered_groups()
    first, _ = steps(kept, 1)[0]
    state = copy.deepcopy(kept.state_dict())
    assert len(kept) == PROMPTS // SIZE
    batches = iter(filtered_groups(state=state)[0])
    resumed, whole = filtered_groups(state=state)[0], filtered_groups()[0]
    assert steps(whole, 2) == [(first, kept.report), steps(resumed, 1)[0]]
    assert next(batches)["input_ids"][:, 0].tolist() == [6, 7]  # after three batches, whose surplus is dropped


def refusals(*overrides):
    checks = RULES.checks(composed("deepseekv3_tiny_cpu", ["recipe.filter_groups.metric=score", *overrides]))
    return [check.detail for check in checks if check.name == "filter groups" and not check.ok]


@pytest.mark.parametrize(("override", "words"), [
    ("actor_rollout_ref.rollout.n=1", "rollout.n is 1"),
    ("recipe.tensor_cache.enabled=true", "recipe.tensor_cache.enabled is true"),
    ("recipe.rollout.replay=outputs/x", "recipe.rollout.replay gives the responses"),
    ("algorithm.adv_estimator=remax", "remax"),
    ("recipe.rewards=[{name: reward_model, path: x}]", "recipe.rewards has a reward model"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused_by_name(override, words):
    (fault,) = refusals(override)
    assert words in fault and refusals() == []
