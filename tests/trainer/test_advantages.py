"""The critic-free presets of configs/algo by verl's own compute_advantage and agg_loss of both lines: closed forms.

Each preset is composed, and its keys are handed on as verl's fit() does; a control changes one key of it.
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


def module_of(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["pypi", pytest.param("a3", marks=pytest.mark.upstream)])
def trainer(request, pytestconfig):
    """The module ray_trainer of a line, over that line's core_algos and torch_functional."""
    root = Path(verl.__file__).parent
    if request.param == "a3":
        root = pytestconfig.getoption("--upstream") / "verl/verl"
    module = module_of(root / "trainer/ppo/ray_trainer.py", f"ray_trainer_{request.param}")
    module.core_algos = module_of(root / "trainer/ppo/core_algos.py", f"core_algos_{request.param}")
    module.core_algos.verl_F = module_of(root / "utils/torch_functional.py", f"functional_{request.param}")
    return module


def advantages(trainer, algo, *overrides, rewards=REWARDS, mask=MASK, uid=UID, greedy=GREEDY):
    """[B, S] by the preset with overrides."""
    algorithm = composed("deepseekv3_tiny_cpu", [f"algo={algo}", *overrides]).verl.algorithm
    at_end = torch.zeros(mask.shape, dtype=rewards.dtype)
    at_end[torch.arange(len(mask)), mask.sum(1) - 1] = rewards
    tensors = {"token_level_rewards": at_end, "response_mask": mask, "reward_baselines": greedy}
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})
    scaled = {"norm_adv_by_std_in_grpo": algorithm.norm_adv_by_std_in_grpo, "gamma": algorithm.gamma}
    return trainer.compute_advantage(data, algorithm.adv_estimator, **scaled).batch["advantages"].to(torch.float64)


def by_response(values):
    """[B, S]: each response's value on its tokens."""
    return torch.tensor(values, dtype=torch.float64)[:, None] * MASK


def near(found, expected):
    return torch.allclose(found, expected, atol=2e-6)  # verl's group means are fp32


def moments(found, mask=MASK):
    of_tokens = found[mask.bool()]
    return of_tokens.mean(), of_tokens.var()


def test_dr_grpo_is_the_reward_less_the_groups_mean_and_has_no_std(trainer):
    assert near(advantages(trainer, "dr_grpo"), by_response([1, -1, -3.5, 3.5]))
    scaled = by_response([0.5**0.5, -(0.5**0.5), -(0.5**0.5), 0.5**0.5])  # at n = 2
    assert near(advantages(trainer, "grpo"), scaled)
    assert not near(
        advantages(trainer, "dr_grpo", "algorithm.norm_adv_by_std_in_grpo=true"), advantages(trainer, "dr_grpo")
    )


def test_dr_grpo_divides_by_the_width_whatever_the_length(trainer):
    """A token's weight is 1 / width at micro batches of one sample; in GRPO's token-mean it depends on the length."""
    weights = {}
    for algo in ("dr_grpo", "grpo", "rloo"):
        mode = composed("deepseekv3_tiny_cpu", [f"algo={algo}"]).verl.actor_rollout_ref.actor.loss_agg_mode
        ones = torch.ones(1, MASK.shape[1], dtype=torch.float64)
        losses = [trainer.core_algos.agg_loss(ones, row[None], mode) for row in MASK.double()]
        weights[algo] = [float(loss / row.sum()) for loss, row in zip(losses, MASK, strict=True)]
    assert weights["dr_grpo"] == pytest.approx([1 / 4] * 4) and weights["rloo"] == pytest.approx([1] * 4)
    assert weights["grpo"] == pytest.approx([1 / 3, 1 / 2, 1 / 4, 1])


def test_rloo_of_two_responses_is_their_difference(trainer):
    assert near(advantages(trainer, "rloo"), by_response([2, -2, -7, 7]))
    one_prompt = advantages(trainer, "rloo", uid=np.array(["a"] * 4, dtype=object))
    assert near(one_prompt, by_response([r - (7 - r) / 3 for r in REWARDS.tolist()]))
    assert not near(advantages(trainer, "rloo", "algorithm.adv_estimator=grpo"), by_response([2, -2, -7, 7]))


@pytest.mark.parametrize("algo", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reinforce_plus_plus_is_white_over_the_tokens_of_the_batch(trainer, algo, dtype):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 65, (64,), generator=generator)
    mask = (torch.arange(64) < lengths[:, None]).long()
    rewards = torch.randn(64, dtype=dtype, generator=generator)
    batch = {"rewards": rewards, "mask": mask, "greedy": rewards, "uid": np.repeat(np.arange(16).astype(object), 4)}
    mean, var = moments(advantages(trainer, algo, **batch), mask)
    assert abs(mean) < 1e-6 and abs(var - 1) < 1e-5
    mean, var = moments(advantages(trainer, "rloo", **batch), mask)
    assert abs(var - 1) > 1e-2


def test_a_reward_common_to_a_prompt_is_in_reinforce_plus_plus_but_not_in_its_baseline(trainer):
    easier = REWARDS + torch.tensor([10.0, 10.0, 0.0, 0.0], dtype=torch.float64)
    plain, baseline = "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    assert near(advantages(trainer, baseline, rewards=easier), advantages(trainer, baseline))
    assert not near(advantages(trainer, plain, rewards=easier), advantages(trainer, plain))


def test_remax_is_the_reward_less_that_of_the_greedy_response(trainer):
    assert near(advantages(trainer, "remax"), by_response([2.5, 0.5, -1, 6]))
    assert not near(advantages(trainer, "remax", "algorithm.adv_estimator=rloo"), by_response([2.5, 0.5, -1, 6]))


def test_pass_k_moves_the_best_response_by_what_it_adds(trainer):
    assert near(advantages(trainer, "pass_k"), by_response([2, 0, 0, 7]))
    scaled = advantages(trainer, "pass_k", "algorithm.norm_adv_by_std_in_grpo=true")
    assert near(scaled, by_response([2**0.5, 0, 0, 2**0.5]))
    with pytest.raises(ValueError, match="at least 2"):  # which step/objectives/checks.py refuses before a start
        advantages(trainer, "pass_k", uid=np.array(list("abcd"), dtype=object))
