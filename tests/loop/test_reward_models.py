"""Test reward models that score a run: their parts in the metrics against scores computed apart, on both lines."""

import pytest
import torch
from safetensors.torch import load_file

from verl_patches.layout.inventory import SCORE, SCORE_BIAS
from verl_patches.reshard.region import Region
from verl_patches.weights.reader import WeightReader
from verl_patches.weights.run_folders import value_model_folder
from verl_patches.weights.source import open_source

pytestmark = pytest.mark.slow
RM = ("--steps", "2", "algo=rm", "data.shuffle=false", "trainer.save_freq=1")  # as in test_objectives.py: one run


def with_models(folders):
    """Return overrides for the reward models of two folders, weights 0.5 and -0.25, and the learnable task."""
    entries = [f"{{name: reward_model, path: '{f}', weight: {w}}}" for f, w in zip(folders, (0.5, -0.25), strict=True)]
    return ("recipe.memory.ledger=strict", f"recipe.rewards=[{entries[0]},{{name: by_source}},{entries[1]}]")


def value_model(folder):
    """Return transformers' model without head, and the head's weight [1, H] and bias [1], of a folder of any kind."""
    from transformers import AutoConfig, AutoModel

    source = open_source(value_model_folder(folder))
    tensors = {name: torch.empty(tensor.shape) for name, tensor in source.tensors.items()}
    with WeightReader(source) as reader:
        for name, tensor in tensors.items():
            reader.copy(Region(name, 0, 0, tensor.shape[0]), tensor)
    head = tensors.pop(SCORE), tensors.pop(SCORE_BIAS, torch.zeros(1))
    config = AutoConfig.from_pretrained(value_model_folder(folder), attn_implementation="eager")
    model = AutoModel.from_config(config, torch_dtype=torch.float32)
    missing, unknown = model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items()}, strict=False)
    assert not missing and not unknown
    return model.eval(), head


@torch.no_grad()
def scores_apart(run, folder, step, places=0):
    """Return the score [B] of each recorded response, `places` before its last token."""
    model, (weight, bias) = value_model(folder)
    tensors, scores = load_file(run.folder / "rollouts" / f"step_{step}.safetensors"), []
    for ids, mask in zip(tensors["input_ids"], tensors["attention_mask"].bool(), strict=True):
        hidden = model(ids[mask][None], use_cache=False).last_hidden_state[0, -1 - places]
        scores.append((hidden @ weight.T + bias).item())
    return torch.tensor(scores)


@pytest.fixture
def folders(smoke):
    """Return the checkpoints of two steps of algo=rm, unchanged."""
    saved = smoke(*RM).folder / "checkpoints"
    return [saved / f"global_step_{step}" for step in (1, 2)]


@pytest.fixture
def scored(smoke, folders):
    return smoke("--steps", "2", "algo=ppo", *with_models(folders))


def test_two_models_score_beside_a_rule(scored, folders):
    for number, step in enumerate(scored.steps, 1):
        found = step["rewards"]
        assert list(found) == ["reward_model_0", "by_source", "reward_model_2"]
        for label, folder in zip(("reward_model_0", "reward_model_2"), folders, strict=True):
            assert found[label] == pytest.approx(scores_apart(scored, folder, number).mean().item(), abs=1e-5)
            # the control: what verl's value of the last token is
            before = scores_apart(scored, folder, number, places=1)
            assert found[label] != pytest.approx(before.mean().item(), abs=1e-3)
        total = 0.5 * found["reward_model_0"] + found["by_source"] - 0.25 * found["reward_model_2"]
        assert step["reward"] == pytest.approx(total, abs=1e-5)


def test_a_models_weights_are_on_the_device_while_it_scores_and_no_longer(scored):
    for step in scored.steps:
        phases = step["memory"]["phases"]
        assert step["memory"]["violations"]["count"] == 0
        assert [name for name, phase in phases.items() if phase["bytes"]["reward_params"]] == ["rm_scores"]
        assert step["offload"]["moves"]["load reward_params"]["count"] == 2
    assert phases["rm_scores"]["bytes"]["reward_params"] < phases["ref"]["bytes"]["ref_params"]  # one at a time


@pytest.mark.upstream
def test_line_a3_gives_the_same_responses_the_same_scores(a3, scored, folders):
    run = a3("--steps", "1", *with_models(folders), "--replay-rollout", str(scored.folder))
    assert run.steps[0]["rewards"] == pytest.approx(scored.steps[0]["rewards"], abs=1e-5)
    assert run.steps[0]["memory"]["violations"]["count"] == 0
