"""Test losses in fp64 against TRL 0.17.0's own functions and closed forms."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl_patches.step.objectives import losses

PAIRS = 6


def log_probs(seed):
    """Return log-probs [P] of policy and reference for chosen and rejected responses, in fp64."""
    return -20 * torch.rand(4, PAIRS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trl_dpo(kind, beta, smoothing, policy, reference):
    from trl import DPOTrainer
    from trl.trainer.dpo_config import FDivergenceType

    trainer = SimpleNamespace(
        beta=beta,
        label_smoothing=smoothing,
        loss_type=kind,
        reference_free=False,
        f_divergence_params=None,
        f_divergence_type=FDivergenceType.REVERSE_KL.value,
        accelerator=SimpleNamespace(device="cpu"),
        use_weighting=False,
    )
    found, chosen, rejected = DPOTrainer.dpo_loss(trainer, *policy, *reference)
    return found.mean(), {"chosen_reward": chosen.mean(), "rejected_reward": rejected.mean()}


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.1), ("ipo", 0.0)])
def test_dpo_cdpo_and_ipo_are_those_of_trl(kind, smoothing):
    chosen, rejected, ref_chosen, ref_rejected = log_probs(0)
    theirs, rewards = trl_dpo(kind, 0.3, smoothing, (chosen, rejected), (ref_chosen, ref_rejected))
    ratios = chosen - ref_chosen, rejected - ref_rejected
    if kind == "ipo":
        loss, metrics = losses.ipo(*ratios, 0.3)
    else:
        loss, metrics = losses.dpo(*ratios, 0.3, smoothing)
        assert losses.dpo(*reversed(ratios), 0.3, smoothing)[0] != loss  # control: the roles matter
    assert float(loss) == pytest.approx(float(theirs), rel=1e-14)
    for name, reward in rewards.items():
        assert float(metrics[name]) == pytest.approx(float(reward), rel=1e-14)
    assert metrics["accuracy"] == ((chosen - ref_chosen) > (rejected - ref_rejected)).double().mean()


def trl_kto(settings, policy, reference, kl_log_probs, desirable):
    from trl import KTOTrainer

    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda found: found)
    trainer = SimpleNamespace(calculate_KL=True, loss_type="kto", accelerator=accelerator, **vars(settings))
    kinds = [side[of] for side in (policy, reference) for of in (desirable, ~desirable)]
    found, *_, kl = KTOTrainer.kto_loss(trainer, *kinds[:2], kl_log_probs[0], *kinds[2:], kl_log_probs[1])
    return found.nanmean(), kl


SETTINGS = SimpleNamespace(beta=0.2, desirable_weight=1.3, undesirable_weight=0.7)


@pytest.mark.parametrize("kl_sign", [1, -1])  # a negative estimate counts as 0
@pytest.mark.parametrize("kinds", ["both", "desirable"])
def test_kto_is_that_of_trl_with_the_kl_of_the_batch(kl_sign, kinds):
    policy, reference, *kl_log_probs = log_probs(1)
    kl_log_probs = sorted(kl_log_probs, key=lambda each: -kl_sign * float(each.sum()))
    desirable = torch.tensor([True, False, True, True, False, False])
    if kinds == "desirable":
        desirable = torch.ones_like(desirable)
    theirs, their_kl = trl_kto(SETTINGS, policy, reference, kl_log_probs, desirable)
    loss, metrics = losses.kto(policy - reference, kl_log_probs[0] - kl_log_probs[1], desirable, SETTINGS)
    assert float(loss) == pytest.approx(float(theirs), rel=1e-14)
    assert float(metrics["kl"]) == pytest.approx(float(their_kl)) and (float(metrics["kl"]) > 0) == (kl_sign > 0)
    assert ("margin" in metrics) == (kinds == "both")
    row_losses = losses.kto(policy - reference, policy - reference, desirable, SETTINGS)
    assert row_losses[0] != loss or kl_sign < 0  # control: a KL of the rows themselves


def test_bradley_terry_is_the_softplus_of_the_difference():
    chosen, rejected, *_ = log_probs(2)
    loss, metrics = losses.bradley_terry(chosen, rejected)
    assert float(loss) == pytest.approx(float(torch.nn.functional.softplus(rejected - chosen).mean()), rel=1e-14)
    assert float(metrics["margin"]) == pytest.approx(float((chosen - rejected).mean()))


def test_steps_are_the_binary_cross_entropy_of_the_marked():
    scores, labels = torch.tensor([0.0, 2.0]).double(), torch.tensor([1.0, 0.0]).double()
    loss, metrics = losses.prm(scores, labels)
    assert float(loss) == pytest.approx((math.log(2) + math.log(1 + math.exp(2))) / 2)
    assert float(metrics["accuracy"]) == 0.0
    assert float(losses.prm(scores[:0], labels[:0])[0]) == 0.0
