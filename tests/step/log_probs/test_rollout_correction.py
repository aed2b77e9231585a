"""Test metrics and weights against closed forms, brute force and numpy."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl_patches.step.log_probs import rollout_correction as rc
from verl_patches.step.log_probs.ratio_settings import Correction, parse_correction

LOG2 = math.log(2.0)
TOKEN = Correction("token", 2.0, None, None)


def sides(seed=0, rows=7, length=5, far=0.3, dtype=torch.float32):
    """Return (rollout, actor, mask): right-padded responses, one without a token, NaN and infinity in the padding."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -3 * torch.rand(rows, length, generator=generator, dtype=dtype) - 0.1
    actor = rollout + far * torch.randn(rows, length, generator=generator, dtype=dtype)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator)
    lengths[0], lengths[1] = 0, length
    mask = torch.arange(length) < lengths.unsqueeze(-1)
    return rollout.masked_fill(~mask, float("nan")), actor.masked_fill(~mask, float("-inf")), mask


def test_metrics_are_those_of_numpy_over_valid_tokens():
    rollout, actor, mask = sides()
    metrics = rc.log_prob_metrics(rc.log_prob_sums(rollout, actor, mask))
    x, y = rollout[mask].double().numpy(), actor[mask].double().numpy()
    far = np.abs(y - x)
    expected = {
        "recipe/logprob_delta_mean": far.mean(),
        "recipe/logprob_delta_max": far.max(),
        "recipe/logprob_delta_std": far.std(ddof=1),
        "recipe/logprob_pearson": np.corrcoef(x, y)[0, 1],
        "rollout_corr/kl": (x - y).mean(),
        "rollout_corr/k3_kl": (np.exp(y - x) - (y - x) - 1).mean(),
    }
    worst = far.argmax()
    expected |= {
        "recipe/worst_token/rollout_logprob": x[worst],
        "recipe/worst_token/actor_logprob": y[worst],
        "recipe/worst_token/position": mask.nonzero()[worst, 1].item(),
    }
    ratios = {name: metrics.pop(name) for name in [*metrics] if name.startswith("recipe/token_ratio/")}
    assert metrics == pytest.approx(expected, rel=1e-6) and len(ratios) == 5


@pytest.mark.parametrize("far", [1e-6, 0.3])
def test_quantiles_are_those_of_the_sorted_ratios(far):
    rollout, actor, mask = sides(rows=900, far=far, dtype=torch.float64)
    metrics = rc.log_prob_metrics(rc.log_prob_sums(rollout, actor, mask))
    log_ratios = (actor.float() - rollout.float())[mask].double().numpy()
    percents = ("0.1", "1", "50", "99", "99.9")
    exact = [np.percentile(log_ratios, float(percent), method="inverted_cdf") for percent in percents]
    found = [math.log(metrics[f"recipe/token_ratio/p{percent}"]) for percent in percents]
    assert found == pytest.approx(exact, rel=0.024)
    assert found != pytest.approx([-value for value in exact], rel=0.024)  # control: the inverse ratio


@pytest.mark.parametrize(("ratio", "expected"), [(0.0, 1.0), (900.0, math.exp(20)), (-900.0, math.exp(-20))])
def test_quantiles_of_one_value(ratio, expected):
    rollout = torch.full((1, 3), -1.0)
    metrics = rc.log_prob_metrics(rc.log_prob_sums(rollout, rollout + ratio, torch.ones(1, 3)))
    assert math.log(metrics["recipe/token_ratio/p50"]) == pytest.approx(math.log(expected), rel=0.024)


def test_k3_is_right_where_both_sides_nearly_agree():
    rollout = torch.full((1, 4), -1.0, dtype=torch.float64)
    metrics = rc.log_prob_metrics(rc.log_prob_sums(rollout, rollout + 1e-7, torch.ones(1, 4)))
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(0.5e-14, rel=1e-5)
    assert "recipe/logprob_pearson" not in metrics  # no spread, no correlation


@pytest.mark.parametrize("correction", [
    None, Correction("token", 2.0, "token_k1", (0.8, 1.2)), Correction("sequence", 1.1, "seq_mean_k1", (0.8, 1.2)),
])  # fmt: skip
def test_parts_of_a_batch_add_up_to_the_whole(correction, monkeypatch):
    batch = sides(seed=3, rows=9)
    whole = rc.log_prob_metrics(rc.log_prob_sums(*batch, correction), correction)
    parts = [
        rc.log_prob_sums(*(t[rows] for t in batch), correction) for rows in (slice(0, 1), slice(1, 4), slice(4, 9))
    ]
    for order in ([*parts, None], parts[::-1]):
        assert rc.log_prob_metrics(rc.merge_sums(order), correction) == pytest.approx(whole, rel=1e-12)
    monkeypatch.setattr(rc, "_CHUNK_ROWS", 2)
    assert rc.log_prob_metrics(rc.log_prob_sums(*batch, correction), correction) == pytest.approx(whole, rel=1e-12)
    assert rc.log_prob_metrics(rc.merge_sums([parts[0]]), correction) == {}  # the response without a token
    assert rc.log_prob_metrics(rc.merge_sums([parts[1]]), correction) != pytest.approx(whole, rel=1e-3)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_a_log_prob_that_is_not_finite_is_reported_and_never_averaged_away(side, value):
    batch = list(sides())
    batch[side][1, 2] = value
    metrics = rc.log_prob_metrics(rc.merge_sums([rc.log_prob_sums(*batch), rc.log_prob_sums(*sides(seed=1))]))
    assert metrics["recipe/logprob_not_finite"] == 1 and math.isnan(metrics["recipe/logprob_delta_mean"])


def test_weights_by_hand():
    rollout = torch.tensor([[-2 * LOG2, -LOG2, -LOG2], [-LOG2, -LOG2, 9.0]])
    actor = torch.tensor([[-LOG2, -2 * LOG2, -LOG2], [-0.5 * LOG2, -0.25 * LOG2, 7.0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    a, b, c = 2**0.5, 2**0.75, 2**1.25
    expected = {
        ("token", 1.5, None): [[1.5, 0.5, 1.0], [a, 1.5, 0.0]],
        ("token", 9.0, None): [[2.0, 0.5, 1.0], [a, b, 0.0]],
        ("sequence", 9.0, None): [[1.0, 1.0, 1.0], [c, c, 0.0]],
        ("sequence", 2.0, None): [[1.0, 1.0, 1.0], [2.0, 2.0, 0.0]],
        (None, 2.0, "seq_sum_k1"): [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]],  # 2.38 is outside 0.5 to 2
        (None, 2.0, "seq_mean_k1"): [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]],  # 2.38 ** (1 / 2) is inside
        ("token", 9.0, "seq_sum_k1"): [[2.0, 0.5, 1.0], [0.0, 0.0, 0.0]],
        (None, 2.0, "token_k1"): [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]],  # the ratios 2 and 1/2 lie on the bounds
    }
    for (level, cap, reject), rows in expected.items():
        found = rc.importance_weights(rollout, actor, mask, Correction(level, cap, reject, (0.5, 2.0)))
        torch.testing.assert_close(found.weights, torch.tensor(rows), rtol=1e-6, atol=0)
        accepted = [[True] * 3, [any(rows[1])] * 3]
        assert found.accepted[mask.bool()].tolist() == torch.tensor(accepted)[mask.bool()].tolist()


def test_ratios_are_bounded_before_they_overflow():
    rollout, actor, ones = torch.tensor([[-900.0, -1.0]]), torch.tensor([[-1.0, -900.0]]), torch.ones(1, 2)
    ratios = rc.importance_weights(rollout, actor, ones, Correction("token", 1e30, None, None)).weights
    torch.testing.assert_close(ratios, torch.tensor([[20.0, -20.0]]).exp())
    rollout, actor = torch.tensor([[-30.0, -0.1]]), torch.tensor([[-0.1, -20.0]])  # k1: -20, not -29.9, and 19.9
    assert rc.importance_weights(rollout, actor, ones, Correction(None, 2.0, "seq_sum_k1", (0.8, 1.2))).accepted.all()


def test_weights_of_bf16_sides_are_fp32():
    rollout, actor = (torch.tensor([[value]], dtype=torch.bfloat16) for value in (-1.0, -1.0078125))
    weights = rc.importance_weights(rollout, actor, torch.ones(1, 1), TOKEN).weights
    assert weights.dtype is torch.float32 and weights.item() == pytest.approx(math.exp(-0.0078125), rel=1e-6)


@pytest.mark.parametrize("bounds", [(0.5, 1.1), (0.9, 3.0)])
@pytest.mark.parametrize("reject", ["seq_sum_k1", "seq_mean_k1"])
def test_a_sequence_is_rejected_by_verls_k1(reject, bounds):
    """Check verl's rule: log(low) <= sum or mean of -clamp(log pi_actor - log pi_rollout, -20, 20) <= log(high)."""
    rollout, actor, mask = sides(seed=2, rows=40, far=0.4, dtype=torch.float64)
    rollout[2, 0], actor[2, 0] = -30.0, 0.0
    accepted = rc.importance_weights(rollout, actor, mask, Correction(None, 2.0, reject, bounds)).accepted
    found = accepted[:, 0]
    low, high = np.log(bounds)
    kept, other_way = [], []
    for x, y, valid in zip(rollout.numpy(), actor.numpy(), mask.numpy(), strict=True):
        k1 = -np.clip(y[valid] - x[valid], -20, 20)
        statistic = k1.sum() / (max(len(k1), 1) if reject == "seq_mean_k1" else 1)
        kept.append(low <= statistic <= high)
        other_way.append(low <= -statistic <= high)
    assert found.tolist() == kept != other_way and torch.equal(accepted, found.unsqueeze(-1).expand_as(mask))
    assert set(kept) == {True, False}


@pytest.mark.parametrize(
    ("level", "ratios", "high"), [("token", [2.0, 0.5, 1.0, 0.25], 1 / 4), ("sequence", [2.0, 2.0, 0.25, 0.25], 1 / 2)]
)
def test_weight_metrics_are_verls(level, ratios, high):
    """Check mean, max and min before the cap; std and ESS of ratios clamped between 1 / cap and cap."""
    rollout = torch.tensor([[-LOG2, -LOG2], [-LOG2, -LOG2]])
    actor = torch.tensor([[0.0, -2 * LOG2], [-LOG2, -3 * LOG2]])  # ratios 2, 1/2 and 1, 1/4
    if level == "sequence":
        actor[0, 1] = -LOG2
    correction = Correction(level, 1.5, "seq_sum_k1", (0.4, 2.0))  # pi_rollout / pi_actor of the second is 4
    found = rc.log_prob_metrics(rc.log_prob_sums(rollout, actor, torch.ones(2, 2), correction), correction)
    clamped = np.clip(ratios, 1 / 1.5, 1.5)
    expected = {
        "rollout_is_mean": np.mean(ratios),
        "rollout_is_std": clamped.std(),
        "rollout_is_max": 2.0,
        "rollout_is_min": 0.25,
        "rollout_is_eff_sample_size": 1 / np.mean((clamped / clamped.mean()) ** 2),
        "rollout_is_ratio_fraction_high": high,
        "rollout_rs_masked_fraction": 0.5,
        "rollout_rs_seq_masked_fraction": 0.5,
    }
    assert {name: found[f"rollout_corr/{name}"] for name in expected} == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("text", "bounds"), [("0.5_2.0", (0.5, 2.0)), ("4.0", (0.25, 4.0)), ("0.9_0.99", (0.9, 0.99))])
def test_bounds_of_a_ratio(text, bounds):
    section = SimpleNamespace(rollout_is=None, rollout_is_threshold=2.0, rollout_rs="seq_sum_k1")
    section.rollout_rs_threshold = text
    assert parse_correction(section) == Correction(None, 2.0, "seq_sum_k1", bounds)
