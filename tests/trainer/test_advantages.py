"""Test the critic-free presets of configs/algo by verl's compute_advantage and agg_loss of both lines: closed forms.

Each preset is composed, and its keys are passed on as verl's fit() does.
"""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
import verl
from verl import DataProto

from tests.runs import composed

MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0]])  # two prompts, two responses each
REWARDS = torch.tensor([3.0, 1.0, -2.0, 5.0], dtype=torch.float64)  # at a response's last token
UID = np.array(["a", "a", "b", "b"], dtype=object)
GREEDY = torch.tensor([0.5, 0.5, -1.0, -1.0], dtype=torch.float64)  # rewards of greedy responses


def load_module(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def trainer(request, pytestconfig):
    """Return the module ray_trainer of a line, over that line's core_algos and torch_functional."""
    root = Path(verl.__file__).parent
    if request.param == "a3":
        root = pytestconfig.getoption("--upstream") / "verl/verl"
    module = load_module(root / "trainer/ppo/ray_trainer.py", f"ray_trainer_{request.param}")
    module.core_algos = load_module(root / "trainer/ppo/core_algos.py", f"core_algos_{request.param}")
    module.core_algos.verl_F = load_module(root / "utils/torch_functional.py", f"functional_{request.param}")
    return module


def advantages(trainer, algo, rewards=REWARDS):
    """Return advantages [B, S] by the preset."""
    algorithm = composed("deepseekv3_tiny_cpu", [f"algo={algo}"]).verl.algorithm
    at_end = torch.zeros(MASK.shape, dtype=rewards.dtype)
    at_end[torch.arange(len(MASK)), MASK.sum(1) - 1] = rewards
    tensors = {"token_level_rewards": at_end, "response_mask": MASK, "reward_baselines": GREEDY}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": UID})
    scaled = {"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo, "gamma": algorithm.gamma}
    return trainer.compute_advantage(data, algorithm.adv_estimator, **scaled).batch["advantages"].to(torch.float64)


def by_response(values):
    """Return [B, S] with each response's value on its tokens."""
    return torch.tensor(values, dtype=torch.float64)[:, None] * MASK


def near(found, expected):
    return torch.allclose(found, expected, atol=2e-6)  # verl's group means are fp32


HALF = 0.5**0.5  # at n = 2, over the group's standard deviation
CLOSED_FORMS = {
    "grpo": [HALF, -HALF, -HALF, HALF],
    "dr_grpo": [1, -1, -3.5, 3.5],  # the reward less the group's mean
    "rloo": [2, -2, -7, 7],  # the difference of two responses
    "remax": [2.5, 0.5, -1, 6],  # the reward less that of the greedy response
    "pass_k": [2, 0, 0, 7],  # what the best response adds
}


@pytest.mark.parametrize("algo", CLOSED_FORMS)
def test_a_preset_has_the_advantages_of_its_paper_and_of_no_other(trainer, algo):
    found = advantages(trainer, algo)
    assert [other for other, values in CLOSED_FORMS.items() if near(found, by_response(values))] == [algo]


def test_dr_grpo_divides_by_the_width_whatever_the_length(trainer):
    """Check that a token weighs 1 / width at micro batches of one sample; in GRPO's token-mean the length counts."""
    weights = {}
    for algo in ("dr_grpo", "grpo", "rloo"):
        mode = composed("deepseekv3_tiny_cpu", [f"algo={algo}"]).verl.actor_rollout_ref.actor.loss_agg_mode
        ones = torch.ones(1, MASK.shape[1], dtype=torch.float64)
        losses = [trainer.core_algos.agg_loss(ones, row[None], mode) for row in MASK.double()]
        weights[algo] = [float(loss / row.sum()) for loss, row in zip(losses, MASK, strict=True)]
    assert weights["dr_grpo"] == pytest.approx([1 / 4] * 4) and weights["rloo"] == pytest.approx([1] * 4)
    assert weights["grpo"] == pytest.approx([1 / 3, 1 / 2, 1 / 4, 1])


def test_reinforce_plus_plus_is_white_and_only_its_baseline_drops_what_is_common_to_a_prompt(trainer):
    easier = REWARDS + torch.tensor([10.0, 10.0, 0.0, 0.0], dtype=torch.float64)
    for algo, drops in (("reinforce_plus_plus", False), ("reinforce_plus_plus_baseline", True)):
        found = advantages(trainer, algo)
        of_tokens = found[MASK.bool()]
        assert abs(of_tokens.mean()) < 1e-6 and abs(of_tokens.var() - 1) < 1e-5
        assert near(advantages(trainer, algo, rewards=easier), found) is drops
